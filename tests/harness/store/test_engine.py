"""Opening databases: what is refused, several processes at once, what a crash leaves."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from harness.errors import (
    MissingStoreError,
    NewerSchemaError,
    NotAStoreError,
    StoreLockedError,
    StoreUnavailableError,
)
from harness.store import engine, migrations, schema
from harness.store.records import Run
from harness.store.store import ResultsStore

MakeRun = Callable[..., Run]

WRITER = """
import sys
from harness.store.records import Run, Measurement
from harness.store.store import ResultsStore
path, run_json, repetitions = sys.argv[1], sys.argv[2], int(sys.argv[3])
run = Run.model_validate_json(run_json)
with ResultsStore.open(path) as store:
    with store.recording(run) as recorder:
        for repetition in range(repetitions):
            recorder.add_values({"init_s": 1.0, "ttft_s": 0.5}, repetition=repetition)
        if sys.argv[4:] == ["hang"]:
            print("begun", flush=True)
            sys.stdin.read()
"""


@contextmanager
def writer(path: Path, run: Run, repetitions: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(path), run.model_dump_json(), str(repetitions)]
    with subprocess.Popen(
        [*command, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_write_at_once_and_lose_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "shared.db"
    runs = [make_run() for _ in range(4)]
    processes = []
    for run in runs:  # all of them also race to make the database
        command = [sys.executable, "-c", WRITER, str(path), run.model_dump_json(), "15"]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with ResultsStore.open(path, create=False) as store:
        kept = {run.id: run for run in store.list_runs()}
    assert set(kept) == {run.id for run in runs}
    for run in kept.values():
        assert run.status == "done"
        assert len(run.values("init_s")) == len(run.values("ttft_s")) == 15


def test_a_killed_writer_leaves_evidence(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "results.db"
    run = make_run()
    with writer(path, run, 2, "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        with ResultsStore.open(path, create=False) as store:
            assert store.get_run(run.id).status == "running"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        with ResultsStore.open(path, create=False) as store:
            kept = store.get_run(run.id)
    assert kept.status == "interrupted"
    assert len(kept.values("init_s")) == 2
    with ResultsStore.open(path), closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT status FROM runs").fetchall() == [("interrupted",)]


def test_a_reader_sees_one_state_while_others_write(tmp_path: Path, make_run: MakeRun) -> None:
    with ResultsStore.open(tmp_path / "results.db") as store:
        store.write_run(make_run())
        with (
            ResultsStore.open(tmp_path / "results.db", create=False) as reader,
            closing(sqlite3.connect(tmp_path / "results.db")) as other,
        ):
            other.execute("BEGIN IMMEDIATE")
            assert len(reader.list_runs()) == 1
            other.execute("ROLLBACK")


def test_sqlite_is_set_up_for_durability(tmp_path: Path) -> None:
    with ResultsStore.open(tmp_path / "results.db"):
        pass
    database = engine.open_database(tmp_path / "results.db", create=True)
    with database.reading() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous")
        }
    database.close()
    assert found == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2}


def test_closing_leaves_a_single_file(tmp_path: Path, make_run: MakeRun) -> None:
    with ResultsStore.open(tmp_path / "results.db") as store:
        store.write_run(make_run())
    assert [path.name for path in tmp_path.iterdir()] == ["results.db"]


def test_a_lock_that_stays_is_a_typed_error(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "results.db"
    with (
        ResultsStore.open(path, busy_timeout_s=0.1) as store,
        closing(sqlite3.connect(path)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreLockedError, match=r"locked by another process for 0\.1 s"):
            store.write_run(make_run())
        other.execute("ROLLBACK")
        store.write_run(make_run())


def test_reading_never_makes_a_database(tmp_path: Path) -> None:
    with pytest.raises(MissingStoreError, match="qnnfarm bench"):
        ResultsStore.open(tmp_path / "none.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.db"
    text.write_text("a long note about something else entirely\n" * 10)
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE bookmarks (url)")
    damaged = tmp_path / "damaged.db"
    with ResultsStore.open(damaged):
        pass
    damaged.write_bytes(damaged.read_bytes()[:100] + b"\xff" * 4000)
    empty = tmp_path / "empty.db"
    empty.touch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for create in (False, True):
        for path in (text, foreign, damaged, tmp_path):
            with pytest.raises(NotAStoreError) as caught:
                ResultsStore.open(path, create=create)
            assert "\n" not in str(caught.value)
    with pytest.raises(NotAStoreError, match="empty"):
        ResultsStore.open(empty, create=False)
    assert {path: path.read_bytes() for path in before} == before


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with ResultsStore.open(path):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO qnnfarm_schema VALUES (99, '2030-01-01 00:00:00', '9')")
    for create in (False, True):
        with pytest.raises(NewerSchemaError, match="schema 99, newer than the 2"):
            ResultsStore.open(path, create=create)


def test_an_older_schema_is_migrated_once(tmp_path: Path) -> None:
    database = engine.open_database(tmp_path / "results.db", create=True)
    steps: list[int] = []
    first, second = schema.SCHEMA_VERSION + 1, schema.SCHEMA_VERSION + 2
    later = {
        first: lambda _connection: steps.append(first),
        second: lambda _connection: steps.append(second),
    }
    with database.writing() as connection:
        migrations.prepare(connection, "db")
    for _ in range(2):
        with database.writing() as connection:
            migrations.prepare(connection, "db", supported=second, migrations=later)
    with database.reading() as connection:
        assert migrations.find_version(connection, "db") == second
    database.close()
    assert steps == [first, second]


def test_every_version_has_its_migration() -> None:
    assert sorted(migrations.MIGRATIONS) == list(range(2, schema.SCHEMA_VERSION + 1))


@pytest.mark.parametrize(
    "location",
    ["nosuchdb://host/name", "postgresql+nosuchdriver://u:secret@host/name", "://", "mysql://["],
)
def test_unusable_urls_are_typed_errors_without_secrets(location: str) -> None:
    with pytest.raises(StoreUnavailableError) as caught:
        ResultsStore.open(location)
    assert "secret" not in str(caught.value)


def test_passwords_are_not_in_the_location() -> None:
    url = "postgresql+psycopg://user:secret@/results?host=/run&password=secret"
    pytest.importorskip("psycopg", reason="needs PostgreSQL's driver")
    database = engine.open_database(url, create=False)
    assert database.location == "postgresql+psycopg://user:***@/results"
    database.close()


def test_a_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="folder does not exist"):
        ResultsStore.open(tmp_path / "no" / "results.db")


@pytest.mark.parametrize("name", ["a?b#c%20.db", "naïve \N{SNOWMAN} 'x\".db", "-wal", " "])
def test_any_file_name_will_do(tmp_path: Path, make_run: MakeRun, name: str) -> None:
    with ResultsStore.open(tmp_path / name) as store:
        store.write_run(make_run())
    with ResultsStore.open(f"sqlite:///{tmp_path / name}", create=False) as store:
        assert len(store.list_runs()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_read_only_folder_can_be_read(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ResultsStore.open(tmp_path / "results.db") as store:
        store.write_run(make_run())
    monkeypatch.setattr(os, "access", lambda *_: False)
    with ResultsStore.open(tmp_path / "results.db", create=False) as store:
        assert len(store.list_runs()) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["results.db"]


def test_the_tables_are_portable() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in schema.metadata.sorted_tables:
        text = str(CreateTable(table).compile(dialect=dialect))
        assert table.name in text
