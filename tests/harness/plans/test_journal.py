"""The journal of a plan: what it remembers, also of a process that was killed."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import DeviceLostError
from harness.plans.cells import Cell
from harness.plans.journal import CellEnd, Journal
from harness.plans.outcome import CellOutcome, CellResult, Failure
from harness.results.database import ResultsDatabase
from harness.results.store import ResultsStore
from tests.command_line import Started
from tests.harness.plans.farm import cells


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ResultsDatabase]:
    with ResultsStore.open(tmp_path / "results.db") as store:
        yield store.database


def outcome(cell: Cell, duration_s: float = 2.5) -> CellOutcome:
    result = CellResult(summary="as fast as ever")
    return CellOutcome(cell, "done", device="pixel", result=result, duration_s=duration_s)


def begun(database: ResultsDatabase, place: str = "", *, fresh: bool = False) -> Journal:
    journal = Journal(database, "plan", place)
    journal.begin(fresh=fresh)
    return journal


def write(database: ResultsDatabase) -> list[Cell]:
    """A journal of three cells: done, failed, and cut off."""
    done, failed, _ = todo = cells(3)
    failure = Failure.of(DeviceLostError("s", "a push", "closed"), failed.workload)
    journal = begun(database)
    for cell in todo:
        journal.record_start(cell.key, "pixel")
    lost = CellOutcome(failed, "failed", device="pixel", failures=(("pixel", failure),))
    journal.record_ends([outcome(done), lost])
    return todo


def test_a_later_run_knows_what_became_of_each_cell(database: ResultsDatabase) -> None:
    assert Journal(database, "plan").plan_run_id == "", "a database that has no journal yet"
    done, failed, lost = write(database)
    journal = Journal(database, "plan")
    assert journal.ends.keys() == {done.key, failed.key, lost.key}
    assert journal.ends[done.key] == CellEnd("done", "", "pixel", "", "", "as fast as ever", 2.5)
    assert journal.ends[failed.key].error == "DeviceLostError"
    assert "closed" in journal.ends[failed.key].reason
    assert journal.ends[lost.key] == CellEnd("begun", device="pixel")
    assert journal.durations == {done.key: 2.5}
    run = journal.plan_run_id
    journal.begin(fresh=False)
    assert journal.plan_run_id == run
    assert journal.ends
    assert begun(database, "another place").ends == {}
    assert Journal(database, "another plan").durations == {}


def test_a_database_that_is_kept_open_keeps_its_wal(
    database: ResultsDatabase, tmp_path: Path
) -> None:
    """Clearing it up after each write takes several fsyncs, and a plan writes for each cell."""
    wal = tmp_path / "results.db-wal"
    with database.kept_open():
        begun(database)
        assert wal.stat().st_size > 0
    assert not wal.exists()


def test_a_fresh_start_forgets_results_and_keeps_durations(database: ResultsDatabase) -> None:
    done, *_ = write(database)
    before = Journal(database, "plan").plan_run_id
    begun(database, fresh=True)
    journal = Journal(database, "plan")
    assert journal.plan_run_id != before
    assert journal.ends == {}
    assert journal.durations == {done.key: 2.5}
    journal.record_ends([outcome(done, 1.5)])
    assert Journal(database, "plan").durations == {done.key: 1.5}


def test_a_fresh_start_removes_what_is_90_days_old(
    database: ResultsDatabase, tmp_path: Path
) -> None:
    def counts() -> list[int]:
        query = "SELECT count(*) FROM plan_cells GROUP BY plan_run ORDER BY 1"
        return [count for (count,) in ask(query)]

    def ask(query: str) -> list[tuple[int]]:
        with closing(sqlite3.connect(tmp_path / "results.db", isolation_level=None)) as connection:
            return connection.execute(query).fetchall()

    (cell, *_) = write(database)
    ask("UPDATE plan_runs SET created_at = '2020-01-01 00:00:00.000000'")
    begun(database, "another place", fresh=True).record_ends([outcome(cell)])
    assert counts() == [1, 3]
    begun(database, fresh=True)
    assert counts() == [1]


def test_text_from_outside_is_stored_as_it_can_be(database: ResultsDatabase) -> None:
    (cell,) = cells(1)
    hostile = CellResult(summary='a\nb","\x00\ud800')
    begun(database).record_ends([replace(outcome(cell), result=hostile)])
    assert Journal(database, "plan").ends[cell.key].summary == 'a\nb","\ufffd\ufffd'


_KILLED = """
import os, pathlib, signal, sys
from harness.plans.journal import Journal
from harness.results.store import ResultsStore
from tests.harness.plans.farm import cells
from tests.harness.plans.test_journal import outcome

with ResultsStore.open(sys.argv[1]) as store:
    journal = Journal(store.database, "plan")
    journal.begin(fresh=False)
    for cell in cells(3):
        journal.record_start(cell.key, "pixel")
    journal.record_ends([outcome(cell) for cell in cells(2)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_recorded_is_there(tmp_path: Path) -> None:
    with Started("-c", _KILLED, tmp_path / "results.db") as process:
        assert process.wait(200) == -9
    with ResultsStore.open(tmp_path / "results.db") as store:
        ends = Journal(store.database, "plan").ends
    assert [ends[cell.key].status for cell in cells(3)] == ["done", "done", "begun"]
