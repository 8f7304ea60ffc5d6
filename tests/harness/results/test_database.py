"""Opening databases: what is refused, several processes at once, what a crash leaves."""

import contextlib
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import MissingStoreError, StoreUnavailableError
from harness.results import schema
from harness.results.database import open_database
from harness.results.store import ResultsStore
from tests.command_line import Started
from tests.harness.results.places import Place, PostgresqlPlace, make_run

BOTH_ENGINES = True

pytestmark = pytest.mark.timeout(900)

WRITER = """
import sys
from harness.results.metrics import Measurement
from harness.results.records import Run
from harness.results.store import ResultsStore
run = Run.model_validate_json(sys.argv[2])
with ResultsStore.open(sys.argv[1]) as store:
    with store.recording(run) as recorder:
        for repetition in range(15):
            recorder.add_values({"init_s": 1.0, "ttft_s": 0.5}, repetition=repetition)
"""


def test_processes_write_at_once_and_lose_nothing(place: Place) -> None:
    runs = [make_run() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        # All of them also race to make the database.
        words = ("-c", WRITER, place.location)
        processes = [stack.enter_context(Started(*words, run.model_dump_json())) for run in runs]
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert (process.returncode, errors) == (0, "")
    with ResultsStore.open(place.location, create=False) as store:
        kept = {run.id: run for run in store.list_runs()}
    assert set(kept) == {run.id for run in runs}
    for run in kept.values():
        assert run.status == "done"
        assert len(run.values("init_s")) == len(run.values("ttft_s")) == 15
    assert place.rows("SELECT version FROM qnnfarm_results") == [(schema.SCHEMA_VERSION,)]


def test_threads_write_one_run_at_once_and_lose_nothing(store: ResultsStore) -> None:
    run = make_run(provenance=make_run().provenance.model_copy(update={"library_versions": {}}))
    recorder = store.begin_run(run)

    def write(number: int) -> None:
        recorder.add_conditions([{f"c{number}": number}])
        recorder.add_library_versions({f"v{number}": "1"})
        recorder.add_values({"ttft_s": 1.0}, repetition=number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(12)))
    kept = store.get_run(run.id)
    everything = {str(number) for number in range(12)}
    assert {name[1:] for one in kept.conditions for name in one} == everything
    assert {name[1:] for name in kept.provenance.library_versions} == everything
    assert len(kept.values("ttft_s")) == 12


def test_a_reader_sees_one_state_while_others_write(place: Place) -> None:
    with ResultsStore.open(place.location) as store:
        store.write_run(make_run())
        with ResultsStore.open(place.location, create=False) as reader, place.held():
            assert len(reader.list_runs()) == 1


def test_a_transaction_reads_what_it_read_before(place: Place) -> None:
    """Runs and their measurements are two queries: nothing may be written between them."""
    count = "SELECT (SELECT count(*) FROM runs) + (SELECT count(*) FROM measurements)"
    with ResultsStore.open(place.location) as store:
        store.write_run(make_run())
        database = open_database(place.location, create=False)
        with database.reading() as connection:
            assert connection.exec_driver_sql(count).scalar() == 1
            store.write_run(make_run())
            assert connection.exec_driver_sql(count).scalar() == 1
        database.close()
        assert len(store.list_runs()) == 2


def test_opening_to_read_writes_nothing(place: Place) -> None:
    with ResultsStore.open(place.location):
        pass
    with ResultsStore.open(place.location, create=False) as store:
        with pytest.raises(StoreUnavailableError, match=r"read-?only"):
            store.write_run(make_run())
        assert store.list_runs() == ()


def test_sqlite_is_set_up_for_durability(tmp_path: Path) -> None:
    with ResultsStore.open(tmp_path / "results.db"):
        pass
    database = open_database(tmp_path / "results.db", create=True)
    with database.reading() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous")
        }
    database.close()
    assert found == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2}


def test_a_lock_that_stays_is_a_typed_error(place: Place) -> None:
    with ResultsStore.open(place.location, busy_timeout_s=0.1) as store:
        with (
            place.held(),
            pytest.raises(
                StoreUnavailableError, match=r"locked by another process for 0\.1 s"
            ) as caught,
        ):
            store.write_run(make_run())
        assert "geheim" not in str(caught.value)
    with ResultsStore.open(place.location) as store:
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
            with pytest.raises(StoreUnavailableError) as caught:
                ResultsStore.open(path, create=create)
            assert "\n" not in str(caught.value)
    with pytest.raises(StoreUnavailableError, match="empty"):
        ResultsStore.open(empty, create=False)
    assert {path: path.read_bytes() for path in before} == before


def test_an_empty_database_is_not_read_and_stays_empty(postgresql: PostgresqlPlace) -> None:
    with pytest.raises(MissingStoreError, match="`qnnfarm bench --db` makes one"):
        ResultsStore.open(postgresql.location, create=False)
    ResultsStore.check(postgresql.location)
    assert postgresql.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []


@pytest.mark.parametrize("table", ["runs", "measurements", "telemetry"])
def test_a_database_with_others_tables_is_shared_or_refused(
    postgresql: PostgresqlPlace, table: str
) -> None:
    postgresql.run(f"CREATE TABLE {table} (title TEXT)")
    for create in (False, True):
        with pytest.raises(StoreUnavailableError, match="tables of another program"):
            ResultsStore.open(postgresql.location, create=create)
    postgresql.run(f"ALTER TABLE {table} RENAME TO songs")
    with ResultsStore.open(postgresql.location) as store:
        store.write_run(make_run())
    assert postgresql.rows("SELECT count(*) FROM songs") == [(0,)]


def test_a_newer_schema_is_refused(place: Place) -> None:
    with ResultsStore.open(place.location):
        pass
    place.run("INSERT INTO qnnfarm_results VALUES (99, '2030-01-01 00:00:00', '9')")
    for create in (False, True):
        with pytest.raises(
            StoreUnavailableError, match=f"schema 99, newer than the {schema.SCHEMA_VERSION}"
        ):
            ResultsStore.open(place.location, create=create)
    with pytest.raises(StoreUnavailableError):
        ResultsStore.check(place.location)


@pytest.mark.parametrize(
    "older",
    [
        "CREATE TABLE qnnfarm_schema (version INTEGER)",  # before version 1
        "UPDATE qnnfarm_results SET version = version - 1",
    ],
)
def test_an_older_schema_is_refused_with_what_to_do_and_left_alone(
    place: Place, older: str
) -> None:
    with ResultsStore.open(place.location):
        pass
    place.run(older)
    before = place.rows("SELECT * FROM qnnfarm_results")
    for use in (ResultsStore.check, ResultsStore.open, ResultsStore.open_existing):
        with pytest.raises(StoreUnavailableError, match="name another --db") as caught:
            use(place.location)
        assert "\n" not in str(caught.value)
    assert place.rows("SELECT * FROM qnnfarm_results") == before


def test_a_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="folder does not exist"):
        ResultsStore.open(tmp_path / "no" / "results.db")


@pytest.mark.parametrize("name", ["a?b#c%20.db", "naïve \N{SNOWMAN} 'x\".db", "-wal", " "])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    with ResultsStore.open(tmp_path / name) as store:
        store.write_run(make_run())
    with ResultsStore.open(f"sqlite:///{tmp_path / name}", create=False) as store:
        assert len(store.list_runs()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_read_only_folder_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultsStore.open(tmp_path / "results.db") as store:
        store.write_run(make_run())
    monkeypatch.setattr(os, "access", lambda *_: False)
    with ResultsStore.open(tmp_path / "results.db", create=False) as store:
        assert len(store.list_runs()) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["results.db"]
