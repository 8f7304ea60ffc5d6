"""Roles and TLS of a lab's database: the commands of plugins/lab/lab.md, on a real PostgreSQL."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from procrastinate.jobs import Status

from harness.errors import StoreUnavailableError
from harness.plans.cell_runner import PlanSettings
from harness.plans.cells import make_cell
from harness.plans.journal import CellEnd
from harness.pool.requirement import Requirement
from harness.results.store import ResultsStore
from harness.workloads.command import Command
from plugins.lab.content import CellFiles
from plugins.lab.jobs import TASK, LabJobs, queue_name
from tests.harness.results.places import PostgresqlPlace, make_run
from tests.postgresql_server import PostgresqlServer
from tests.system import program
from tests.waiting import wait_for

_DOCUMENT = Path(__file__).parents[3] / "plugins" / "lab" / "lab.md"
CELL = make_cell("any/any/w", Command(command=("true",)), Requirement())
SETTINGS = PlanSettings(
    plan="p", runner_timeout_s=1, conditions=None, telemetry=False, log_level=None, trace=False,
    labels={},
)  # fmt: skip
FORBIDDEN = (
    "DROP TABLE runs", "TRUNCATE plan_cells", "DELETE FROM plan_cells",
    "CREATE TABLE mine (x INT)", "DELETE FROM runs",
    "UPDATE runs SET status = 'done'", "UPDATE alerts SET state = 'fixed'",
    "UPDATE procrastinate_jobs SET status = 'cancelled'", "GRANT lab_workers TO ada",
)  # fmt: skip


def blocks(language: str, beginning: str) -> str:
    """Return the document's block of a language that begins so."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    return next(block for block in found if block.startswith(beginning))


def url(server: PostgresqlServer, user: str, password: str, query: str = "") -> str:
    return f"postgresql+psycopg://{user}:{password}@localhost:{server.port}/tests{query}"


@pytest.fixture
def server(
    postgresql_server: PostgresqlServer, postgresql: PostgresqlPlace
) -> Iterator[PostgresqlServer]:
    """A server with a lab's database, whose roles are those of the document."""
    LabJobs(postgresql.location).close()
    with closing(postgresql_server.connect("tests")) as connection:
        connection.execute(blocks("sql", "-- reads").encode())
        yield postgresql_server
        for role in ("ada", "station", "lab_workers", "lab_submitters", "lab_readers"):
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_submitter_submits_and_follows_and_administers_nothing(server: PostgresqlServer) -> None:
    with ResultsStore.open(server.url("tests")) as owned:
        owned.begin_run(make_run())
        with owned.database.writing() as connection:  # its writer is gone
            connection.exec_driver_sql("UPDATE runs SET writer = 'x', created_at = '2020-01-01'")
    with LabJobs(url(server, "ada", "secret")) as ada:
        run = ada.begin("p", "ada@laptop", fresh=False)
        assert ada.submit(run, SETTINGS, [(CELL, CellFiles(), 1)]) == 1
        assert set(ada.live(run)) == {CELL.key}
        with LabJobs(url(server, "station", "other")) as station:
            station.register("h1", 1)
            job = station.fetch(queue_name(CELL))
            assert job is not None
            station.record(job, CellEnd("done"))
            station.finish(job, Status.SUCCEEDED)
            station.beat(30)
            station.store.begin_run(make_run()).finish()
            assert set(ada.ends(run)) == {CELL.key}
            assert ada.submit(run, SETTINGS, [(CELL, CellFiles(), 1)]) == 1
            with pytest.raises(StoreUnavailableError, match="permission denied"):
                ada.cancel(run)
            assert station.cancel(run) == 1
            station.unregister()
    with psycopg.connect(
        host="127.0.0.1", port=server.port, user="ada", password="secret", dbname="tests",
        autocommit=True,
    ) as connection:  # fmt: skip
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


def test_forged_row_fails_alone_and_is_recorded(server: PostgresqlServer) -> None:
    """Whoever may submit can write any row, and reads nothing by it, and ends no worker."""
    with (
        LabJobs(url(server, "ada", "secret")) as ada,
        LabJobs(url(server, "station", "other")) as station,
        psycopg.connect(
            host="127.0.0.1", port=server.port, user="ada", password="secret", dbname="tests",
            autocommit=True,
        ) as by_hand,
    ):  # fmt: skip
        station.register("h1", 1)
        foreign = station.begin("p", "station", fresh=True)
        run = ada.begin("p", "ada@laptop", fresh=False)
        assert run != foreign, "a run is its role's"
        good: dict[str, object] = {
            "plan_run": run, "cell": CELL.to_json(), "settings": SETTINGS.model_dump(mode="json"),
            "files": {},
        }  # fmt: skip

        def forge(args: object, lock: str | None = None, queue: str = queue_name(CELL)) -> str:
            lock = lock or f"{run}:{CELL.key}"
            row = (
                "INSERT INTO procrastinate_jobs (queue_name, task_name, queueing_lock, args)"
                " VALUES (%s, %s, %s, %s)"
            )
            by_hand.execute(row, (queue, TASK, lock, json.dumps(args)))
            return lock

        def altered(**values: object) -> dict[str, object]:
            return good | {"cell": json.dumps(json.loads(CELL.to_json()) | values)}

        bad: list[object] = [
            [], {}, "x", good | {"more": 1}, good | {"cell": 5}, good | {"plan_run": "../x"},
            good | {"files": {"files": {"../etc/passwd": "0" * 64}}}, good | {"settings": []},
            altered(timeout_s=-1), altered(timeout_s=1e300), altered(session=1 << 70),
            altered(workload={"kind": "nothing"}), altered(key="f" * 64),
        ]  # fmt: skip
        for number, args in enumerate(bad):
            lock = forge(args, f"{run}:{number:064x}" if isinstance(args, list) else None)
            station.backlog()
            assert station.fetch(queue_name(CELL)) is None, args
            end = station.ends(run)[lock.partition(":")[2]]
            assert end.status == "failed"
            assert "cannot read it" in end.reason
        forge(good, queue="build-x")
        assert station.backlog() == []
        assert station.fetch("build-x") is None
        for lock in ("", ":", "x" * 500, f"{run}:{'y' * 500}"):
            forge(good, lock or "-")
            assert station.fetch(queue_name(CELL)) is None
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="another role"):
            forge(good, f"{foreign}:{CELL.key}")
        forge(good)
        job = station.fetch(queue_name(CELL))
        assert job is not None, "a good one runs"
        row = "INSERT INTO plan_runs (id, plan, submitter, created_at, owner) VALUES"
        by_hand.execute(f"{row} ('abc', 'p', 'x', now(), 'station')".encode())
        assert station.begin("p", "station", fresh=False) == foreign
        station.unregister()


@pytest.fixture
def tls(server: PostgresqlServer) -> Iterator[Path]:
    """The folder with the authority of a server that speaks TLS, as the document makes both."""
    folder = make_authority(server.folder / "tls")
    owner = server.folder.stat()
    (folder / "server.key").chmod(0o600)
    for path in (folder, *folder.iterdir()):
        os.chown(path, owner.st_uid, owner.st_gid)
    settings = blocks("sql", "ALTER SYSTEM").replace("/etc/postgresql/lab", str(folder))
    rules = server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    with closing(server.connect("tests")) as connection:
        for statement in filter(str.strip, settings.split(";")):
            connection.execute(statement.encode())
        yield folder
        rules.write_text(before)
        for name in ("ssl", "ssl_cert_file", "ssl_key_file"):
            connection.execute(f"ALTER SYSTEM RESET {name}".encode())
        connection.execute("SELECT pg_reload_conf()")


def make_authority(folder: Path) -> Path:
    program("openssl")
    commands = blocks("sh", "openssl").replace("db.example.org", "localhost")
    folder.mkdir(exist_ok=True)
    subprocess.run(["sh", "-ec", commands], cwd=folder, check=True, capture_output=True)
    return folder


def test_server_of_another_authority_or_name_is_not_talked_to(
    server: PostgresqlServer, tls: Path, tmp_path: Path
) -> None:
    trusted = f"?sslmode=verify-full&sslrootcert={tls}/ca.crt"
    with LabJobs(url(server, "station", "other", trusted)) as jobs:
        jobs.register("h1", 1)  # through procrastinate's connections, too
        with jobs.store.database.reading() as connection:
            query = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
            ours = f"{query} WHERE usename = 'station'"
            assert connection.exec_driver_sql(ours).scalar_one() is True
        jobs.unregister()
    strange = f"?sslmode=verify-full&sslrootcert={make_authority(tmp_path)}/ca.crt"
    other_name = url(server, "ada", "secret", trusted).replace("@localhost", "@127.0.0.1")
    for location in (url(server, "ada", "secret", strange), other_name):
        with pytest.raises(StoreUnavailableError, match="certificate"):
            LabJobs(location)


def test_submitter_without_tls_or_password_is_refused(server: PostgresqlServer, tls: Path) -> None:
    rules = server.folder / "data" / "pg_hba.conf"
    kept = [line for line in rules.read_text().splitlines() if not line.startswith("host")]
    own = blocks("text", "hostssl").replace(" lab ", " tests ")
    rules.write_text("\n".join([*kept, own]))
    with closing(server.connect("tests")) as connection:
        connection.execute("SELECT pg_reload_conf()")

    def refused(location: str) -> str:
        try:
            LabJobs(location).close()
        except StoreUnavailableError as error:
            return str(error)
        return ""

    plain = url(server, "ada", "secret", "?sslmode=disable")
    wait_for(lambda: "no encryption" in refused(plain), lambda: refused(plain))
    trusted = f"?sslmode=verify-full&sslrootcert={tls}/ca.crt"
    assert refused(url(server, "ada", "secret", trusted)) == ""
    assert "password authentication failed" in refused(url(server, "ada", "guessed", trusted))
    assert "no password supplied" in refused(
        url(server, "ada", "", trusted).replace("ada:@", "ada@")
    )
