"""What only a server does: it is away, it goes away, it has settings, users and passwords.

The commands and the pytest plugin keep and read results there, too.
"""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import Connection, PoolProxiedConnection, event, update

from harness.devices.device import Device
from harness.errors import MissingStoreError, StoreUnavailableError
from harness.results import schema
from harness.results.alerts import set_state
from harness.results.database import open_database
from harness.results.database import shown as shown_location
from harness.results.maintenance import PrunePolicy, disk_usage, prune
from harness.results.metrics import Measurement
from harness.results.records import Run, TelemetrySeries, now
from harness.results.run_recorder import RunRecorder
from harness.results.store import ResultsStore
from tests.command_line import Started, qnnfarm
from tests.conftest import NewPostgresqlServer
from tests.harness.results.places import PostgresqlPlace, make_run
from tests.postgresql_server import PostgresqlServer
from tests.reports.test_cli import Command
from tests.waiting import PATIENCE_S, wait_for

IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # our packages, in this process
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server_to_stop(new_postgresql_server: NewPostgresqlServer) -> Iterator[PostgresqlServer]:
    with new_postgresql_server() as server:
        yield server


@pytest.fixture
def own_server(server_to_stop: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """A server that a test may stop, with an empty database."""
    server_to_stop.create("results")
    yield server_to_stop
    server_to_stop.drop("results")


def refused(location: str, *, create: bool = True) -> str:
    """What is said of a database that cannot be opened."""
    with pytest.raises(StoreUnavailableError) as caught:
        ResultsStore.open(location, create=create)
    text = str(caught.value)
    assert text.isprintable()
    assert text.startswith("cannot use the results database ")
    assert not any(part in text for part in ("secret", "geheim"))
    return text


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("nosuchdb://host/name", "nosuchdb://…: databases are SQLite files, or postgr"),
        ("postgresql+nosuch://u:secret@host/name", "databases are SQLite files, or"),
        ("mysql://u:secret@host/name", "databases are SQLite files, or"),
        ("://", "databases are SQLite files"),
        ("postgresql+psycopg://u:secret@host:port/name", "should be postgresql+psycopg://USER@"),
        ("postgresql+psycopg://u:a@secret@host/name", "written %40"),
        ("postgresql+psycopg://u:a@sec/secret@host/name", "written %40"),
        ("postgresql+psycopg://u:a@secret:b@host/name", "cannot be read"),
        ("postgresql+psycopg://u:secret@127.0.0.1:1/r?nonsense=secret", 'option "nonsense"'),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line_without_secrets(location: str, says: str) -> None:
    assert says in refused(location)


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (
            "postgresql+psycopg://user:secret@/results?host=/run&password=secret",
            "postgresql+psycopg://user:***@/results",
        ),
        ("postgresql://user@lab:5433/results", "postgresql+psycopg://user@lab:5433/results"),
        ("postgres://u:se%40cret@[::1]/r", "postgresql+psycopg://u:***@[::1]/r"),
        ("results.db", "results.db"),
        ("sqlite:///results.db", "results.db"),
    ],
)
def test_passwords_are_not_in_the_location(location: str, shown: str) -> None:
    assert shown_location(location) == shown
    database = open_database(location, create=True)
    assert database.location == shown
    assert "secret" not in repr(vars(database))
    database.close()


def test_a_missing_driver_says_what_to_install_and_files_need_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    said = refused("postgresql+psycopg://u:secret@host/name")
    assert said.endswith("pip install 'qnnfarm[postgresql]'")
    ResultsStore.open(tmp_path / "results.db").close()


def test_writes_that_wait_for_each_other_are_both_kept(postgresql: PostgresqlPlace) -> None:
    """The server ends one of them, which is written again."""
    both_have_one = Barrier(2, timeout=PATIENCE_S)
    ids = schema.runs.c.id
    with ResultsStore.open(postgresql.location) as store:
        runs = (make_run(), make_run())
        for run in runs:
            store.write_run(run)

        def label(order: Sequence[Run]) -> int:
            tries = 0

            def write(connection: Connection) -> None:
                nonlocal tries
                tries += 1
                for run in order:
                    chosen = update(schema.runs).where(ids == run.id)
                    connection.execute(chosen.values(label=order[0].id))
                    if run is order[0] and tries == 1:
                        both_have_one.wait()

            store.database.insist(write)
            return tries

        with ThreadPoolExecutor(2) as threads:
            tries = sorted(threads.map(label, (runs, runs[::-1])))
        assert tries == [1, 2]
        assert len({run.label for run in store.list_runs()}) == 1


@pytest.mark.parametrize("table", ["runs", "alerts"])
def test_a_prune_or_an_alert_that_the_server_ends_is_written_again(
    postgresql: PostgresqlPlace, table: str
) -> None:
    """It has a row that another process waits for, and waits for one that this has."""
    at = now()
    runs = [make_run(status="done", created_at=at, group_id=2 * name, id=2 * name)
            for name in ("a" * 16, "b" * 16)]  # fmt: skip
    with (
        ResultsStore.open(postgresql.location) as store,
        closing(postgresql.server.connect(postgresql.database)) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        for run in runs:
            store.write_run(run)
            alert = schema.alerts.insert().values(
                id=run.id, series="s", metric="ttft_s", name="", devices=[], backfilled=False,
                state="open", began_at=at, found_at=at, ratio=2.0, note="", created_at=at,
                changed_at=at,
            )  # fmt: skip
            with store.database.writing() as connection:
                connection.execute(alert)
        with other.transaction():
            other.execute("SET LOCAL deadlock_timeout = '1h'")  # ours is ended
            other.execute(f"SELECT FROM {table} WHERE id = '{runs[1].id}' FOR UPDATE".encode())
            if table == "runs":
                policy = PrunePolicy(at + timedelta(days=1))
                writing = threads.submit(
                    lambda: sum(one.runs for one in prune(store.database, policy))
                )
            else:
                writing = threads.submit(lambda: len(set_state(store, ["aa", "bb"], "fixed")))
            until(postgresql, _WAITING, 1)
            other.execute(f"SELECT FROM {table} WHERE id = '{runs[0].id}' FOR UPDATE".encode())
        assert writing.result(PATIENCE_S) == 2


def test_a_server_that_is_away_is_one_line(new_port: Callable[[], int]) -> None:
    location = f"postgresql+psycopg://u:secret@127.0.0.1:{new_port()}/results"
    for create in (True, False):
        assert "refused" in refused(location, create=create)
    with pytest.raises(StoreUnavailableError, match="refused"):
        ResultsStore.check(location)
    assert "No such file" in refused("postgresql+psycopg://u:secret@/r?host=/no/such/folder")


def test_a_refused_login_is_one_line(postgresql: PostgresqlPlace) -> None:
    server = postgresql.server
    wrong = postgresql.location.replace(server.password, "secretsecret")
    assert 'password authentication failed for user "lab"' in refused(wrong)
    assert 'database "nowhere" does not exist' in refused(server.url("nowhere"))
    postgresql.run("CREATE ROLE guest LOGIN PASSWORD 'geheimer'")
    try:
        guest = postgresql.location.replace(f"lab:{server.password}", "guest:geheimer")
        with pytest.raises(MissingStoreError):
            ResultsStore.open(guest, create=False)
        assert "permission denied for schema public" in refused(guest)
    finally:
        postgresql.run("DROP ROLE guest")


def test_a_read_only_user_gets_a_report(postgresql: PostgresqlPlace) -> None:
    with ResultsStore.open(postgresql.location) as store:
        store.write_run(make_run())
    postgresql.run("CREATE ROLE reader LOGIN PASSWORD 'geheimer'")
    try:
        postgresql.run("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
        reader = postgresql.location.replace(f"lab:{postgresql.server.password}", "reader:geheimer")
        with ResultsStore.open(reader, create=False) as store:
            assert len(store.list_runs()) == 1
        ResultsStore.check(reader)
        with (
            ResultsStore.open(reader) as store,
            pytest.raises(StoreUnavailableError, match="permission denied for table runs"),
        ):
            store.write_run(make_run())
    finally:
        postgresql.run("DROP OWNED BY reader; DROP ROLE reader")


def test_failing_tests_of_somebody_else_show_no_password(
    pytester: pytest.Pytester,
    postgresql: PostgresqlPlace,
    new_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test runners show arguments and variables of what failed."""
    away = f"postgresql+psycopg://u:geheim@127.0.0.1:{new_port()}/results?password=secret"
    monkeypatch.setenv("AWAY", away)
    wrong = postgresql.location.replace(postgresql.server.password, "geheim")
    monkeypatch.setenv("WRONG", wrong)
    monkeypatch.setenv("EMPTY", postgresql.location)
    ResultsStore.check(postgresql.location)  # SQLAlchemy bears to be loaded once only
    pytester.makepyfile(
        """
        import os, pytest
        from harness.results.store import ResultsStore

        @pytest.mark.parametrize("what", ["AWAY", "WRONG", "EMPTY"])
        def test_it(what):
            with ResultsStore.open(os.environ[what], create=what != "EMPTY") as store:
                store.get_run("0" * 32)
        """
    )
    for style in ("long", "native"):
        result = pytester.runpytest_inprocess("-p", "no:xdist", "--tb", style, "--showlocals")
        result.assert_outcomes(failed=3)
        said = result.stdout.str()
        assert "harness.errors" in said
        assert not any(word in said for word in ("geheim", "secret", postgresql.server.password))


def test_a_unix_socket_will_do(postgresql: PostgresqlPlace) -> None:
    with ResultsStore.open(postgresql.server.url(postgresql.database, socket=True)) as store:
        store.write_run(make_run())
        assert len(store.list_runs()) == 1
        assert postgresql.server.password not in store.location


def test_a_server_that_goes_away_in_the_middle(
    own_server: PostgresqlServer,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What was kept is there when it is back, and whoever kept the store open goes on."""
    run = make_run()
    with ResultsStore.open(own_server.url("results"), busy_timeout_s=0.5) as store:
        with (  # noqa: PT012
            pytest.raises(StoreUnavailableError) as caught,
            store.recording(run) as recorder,
        ):
            recorder.add_values({"init_s": 1.0})
            own_server.stop()
            recorder.add_values({"init_s": 1.0}, repetition=1)
        assert str(caught.value).isprintable()
        (note,) = caught.value.__notes__
        assert "not finished in the store" in note
        for text in (str(caught.value), note, store.location):
            assert own_server.password not in text
        own_server.start()
        assert store.get_run(run.id).values("init_s") == (1.0,)
        RunRecorder(store.database, run).finish("failed", error="the server went away")
        assert store.get_run(run.id).status == "failed"
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert capfd.readouterr().err == ""


def test_a_server_that_restarts_is_waited_for(own_server: PostgresqlServer) -> None:
    with ResultsStore.open(own_server.url("results")) as store:
        with store.recording(make_run()) as recorder:
            recorder.add_values({"init_s": 1.0})
            own_server.stop()
            with ThreadPoolExecutor(1) as pool:
                writing = pool.submit(recorder.add_values, {"init_s": 2.0}, repetition=1)
                time.sleep(0.5)
                assert not writing.done()
                own_server.start()
                writing.result(200)
        (run,) = store.list_runs()
    assert (run.status, run.values("init_s")) == ("done", (1.0, 2.0))


@pytest.mark.parametrize("before", ["commit", "answer"])
def test_a_write_that_a_restart_cut_off_is_done_once(
    own_server: PostgresqlServer, before: str
) -> None:
    """Whether the server kept it or not: only the server knows."""
    run = make_run()
    cuts: list[str] = []

    def restart(_connection: object) -> None:
        if not cuts:
            cuts.append(before)
            own_server.stop()
            own_server.start()

    with ResultsStore.open(own_server.url("results")) as store:
        store.begin_run(run)
        engine = store.database._engine
        if before == "commit":
            event.listen(engine, "commit", restart)
        else:  # the commit reaches the server, and its answer does not reach us
            commit = engine.dialect.do_commit

            def do_commit(connection: PoolProxiedConnection) -> None:
                commit(connection)
                if not cuts:
                    restart(connection)
                    connection.cursor().execute("SELECT 1")

            engine.dialect.do_commit = do_commit  # type: ignore[assignment, method-assign]
        recorder = RunRecorder(store.database, run)
        writes: list[Callable[[], None]] = [
            lambda: recorder.add_values({"init_s": 1.0}),
            lambda: recorder.add_conditions([{"charge": 80}]),
            recorder.finish,
        ]
        for write in writes:
            cuts.clear()
            write()
            assert cuts == [before]
        kept = store.get_run(run.id)
    assert (kept.status, kept.values("init_s")) == ("done", (1.0,))
    assert kept.conditions == ({"charge": 80},)


def test_a_connection_that_is_cut_is_one_line(postgresql: PostgresqlPlace) -> None:
    """What a keeper does, or a timeout on the way."""
    with ResultsStore.open(postgresql.location):
        pass
    database = open_database(postgresql.location, create=True)
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    with (  # noqa: PT012
        pytest.raises(StoreUnavailableError) as caught,
        database.writing() as connection,
    ):
        connection.exec_driver_sql("SELECT 1")
        assert (True,) in postgresql.rows(cut)
        until(postgresql, _OTHERS, 0)
        connection.exec_driver_sql("SELECT 1")
    assert str(caught.value).isprintable()
    database.close()


_WAITING = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
_OTHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


def until(place: PostgresqlPlace, query: str, wanted: int) -> None:
    """Wait until a count is what it should be."""
    wait_for(lambda: place.rows(query) == [(wanted,)], lambda: f"never {wanted}: {query}")


WRITE = """
import sys
from harness.results.records import Run
from harness.results.store import ResultsStore
with ResultsStore.open(sys.argv[1], busy_timeout_s=600) as store:
    print("open", flush=True)
    sys.stdin.readline()
    store.write_run(Run.model_validate_json(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_writer_that_is_ended_while_it_waits_leaves_nothing(
    postgresql: PostgresqlPlace, number: signal.Signals
) -> None:
    run = make_run(measurements=[Measurement(metric="init_s", value=1.0)])
    with Started("-c", WRITE, postgresql.location, run.model_dump_json()) as process:
        try:
            assert process.stdout.readline() == "open\n"
            # It has its row written, and waits with those of the measurements.
            with (
                closing(postgresql.server.connect(postgresql.database)) as other,
                other.transaction(),
            ):
                other.execute("LOCK TABLE measurements IN EXCLUSIVE MODE")
                process.stdin.write("go\n")
                process.stdin.flush()
                until(postgresql, _WAITING, 1)
                process.send_signal(number)
                _, errors = process.communicate(timeout=600)
            assert process.returncode != 0
            assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
            assert postgresql.server.password not in errors
        finally:
            process.kill()
    until(postgresql, _OTHERS, 0)
    with ResultsStore.open(postgresql.location) as store:
        assert store.list_runs() == ()
        store.write_run(run)


def test_the_last_words_of_a_writer_are_kept(postgresql: PostgresqlPlace) -> None:
    """It ends its run while another process, which sees it gone, is about to mark it."""
    run = make_run()
    with ResultsStore.open(postgresql.location) as store:
        store.begin_run(run)
    postgresql.run("UPDATE runs SET writer = rtrim(writer, '0123456789') || '0'")
    with (
        closing(postgresql.server.connect(postgresql.database)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        with other.transaction():
            other.execute("UPDATE runs SET status = 'done'")
            opening = pool.submit(ResultsStore.open, postgresql.location, busy_timeout_s=600)
            until(postgresql, _WAITING, 1)
        with opening.result(timeout=600) as store:
            assert store.get_run(run.id).status == "done"


def test_nothing_idles_between_transactions(postgresql: PostgresqlPlace) -> None:
    """A farm of many processes would use up the server's connections."""
    with ResultsStore.open(postgresql.location) as store:
        store.write_run(make_run())
        until(postgresql, _OTHERS, 0)


def test_what_a_server_is_set_to_changes_nothing(
    postgresql: PostgresqlPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in (
        "default_transaction_isolation = serializable",
        "timezone = 'Asia/Kathmandu'",
        "datestyle = 'German'",
        "extra_float_digits = -15",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
        "lock_timeout = 1",
        "default_transaction_read_only = on",
    ):
        postgresql.run(f"ALTER DATABASE {postgresql.database} SET {setting}")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    run = make_run(
        generated_text="\\x00 \\' 🜁",
        measurements=[Measurement(metric="ttft_s", value=0.1 + 0.2)],
        conditions=[{"w": 0.1 + 0.2, "\\": "\\n"}],
        status="done",
    )
    with ResultsStore.open(postgresql.location) as store:
        store.write_run(run)
        assert store.get_run(run.id) == run


def test_a_database_must_hold_every_text(postgresql_server: PostgresqlServer) -> None:
    latin, raw = "latin_results", "raw_results"
    postgresql_server.create(latin, encoding="LATIN1")
    postgresql_server.create(raw, encoding="SQL_ASCII")
    try:
        assert "its encoding LATIN1 cannot hold every text" in refused(postgresql_server.url(latin))
        run = make_run(generated_text="🜁")
        with ResultsStore.open(postgresql_server.url(raw)) as store:
            store.write_run(run)
            assert store.get_run(run.id).generated_text == "🜁"
    finally:
        postgresql_server.drop(latin)
        postgresql_server.drop(raw)


def test_the_size_of_a_servers_tables(postgresql: PostgresqlPlace) -> None:
    with ResultsStore.open(postgresql.location) as store:
        empty = disk_usage(store.database).total_bytes
        store.write_run(make_run(measurements=[Measurement(metric="init_s", value=1.0)]))
        assert disk_usage(store.database).total_bytes > empty > 0


def test_a_report_of_a_servers_database(postgresql: PostgresqlPlace, tmp_path: Path) -> None:
    run = make_run(measurements=[Measurement(metric="decode_tokens_per_s", value=17.0)])
    with ResultsStore.open(postgresql.location) as store:
        with store.recording(run) as recorder:
            recorder.add_telemetry(
                [TelemetrySeries("temp_c:cpu", "degC", (0.0, 1.0), (30.0, 31.5))], repetition=0
            )
        store.begin_run(make_run())
    command = Command(postgresql.location, tmp_path / "report.html")
    told = command.printed("--json")
    assert command.out.read_text().count("tiny_llama")
    for text in (told, command.out.read_text()):
        assert postgresql.server.password not in text


def test_the_plugin_checks_a_servers_database_and_makes_nothing(
    pytester: pytest.Pytester, postgresql: PostgresqlPlace, new_port: Callable[[], int]
) -> None:
    pytester.makeini(
        "[pytest]\naddopts = -p no:cacheprovider -p no:xdist -p harness.pytest_plugin\n"
    )
    pytester.makepyfile("def test_one(): pass")
    fine = pytester.runpytest_inprocess(*IMPORTED, "--qnnfarm-db", postgresql.location)
    fine.assert_outcomes(passed=1)
    assert postgresql.server.password not in fine.stdout.str()
    assert postgresql.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    away = f"postgresql+psycopg://u:geheim@127.0.0.1:{new_port()}/results"
    refused = pytester.runpytest_inprocess(*IMPORTED, "--qnnfarm-db", away)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [text for text in refused.stderr.lines if text]
    assert line.startswith(
        "ERROR: --qnnfarm-db: cannot use the results database postgresql+psycopg"
    )
    assert "refused" in line
    assert "geheim" not in line


PLAN = """
name: on-a-server
containers: [{{path: {container}, label: tiny}}]
conditions: none
telemetry: false
workloads:
  - {{kind: generate, prompt: In the beginning, max_tokens: 4, sessions: 2}}
"""


@pytest.mark.variant
def test_a_plan_goes_on_where_it_was(
    postgresql: PostgresqlPlace,
    virtual_device: Device,
    build_cache: Path,
    small_bundle: Path,
    tmp_path: Path,
) -> None:
    device = f"{{type: android, identifier: '{virtual_device.serial}'}}"
    (tmp_path / "pool.yaml").write_text(f"devices: [{device}]\n")  # others may be connected
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.format(container=small_bundle))
    for option, runs in (("--dry-run", None), ("--json", 2), ("--json", 2)):
        ran = qnnfarm("run", plan, option, "--db", postgresql.location, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert postgresql.server.password not in ran.stdout + ran.stderr
        if runs is not None:
            with ResultsStore.open(postgresql.location, create=False) as store:
                assert [run.status for run in store.list_runs()] == ["done"] * runs
