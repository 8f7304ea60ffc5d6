"""The journal of a plan: what it remembers, also after a crash in the middle of a line."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import DeviceLostError, JournalError, WrongUseError
from harness.plans.cells import Cell
from harness.plans.journal import Journal, JournalEntry, journal_path
from harness.plans.outcome import CellOutcome, CellResult, Failure
from tests.command_line import Started
from tests.harness.plans.farm import cells

ONE, TWO = "1" * 32, "2" * 32


def outcome(cell: Cell, duration_s: float = 2.5) -> CellOutcome:
    result = CellResult("f" * 32, "as fast as ever", {"decode_tokens_per_s": 12.5})
    return CellOutcome(cell, "done", device="pixel", result=result, duration_s=duration_s)


@contextmanager
def begun(path: Path, plan_run: str = ONE, *, fresh: bool = False) -> Iterator[Journal]:
    with Journal(path) as journal:
        journal.begin("plan", plan_run, fresh=fresh)
        yield journal


def entry(path: Path, cell: Cell) -> JournalEntry:
    with Journal(path) as journal:
        entry = journal.entry(cell.key)
    assert entry is not None
    return entry


def write(path: Path) -> list[Cell]:
    """A journal of three cells: done, failed, and cut off."""
    done, failed, _ = todo = cells(3)
    failure = Failure.of(DeviceLostError("s", "a push", "closed"), failed.workload)
    with begun(path) as journal:
        for cell in todo:
            journal.record_start(cell.key, "pixel")
        journal.record_ends(
            [outcome(done), CellOutcome(failed, "failed", failures=(("pixel", failure),))]
        )
    return todo


def test_a_later_run_knows_what_became_of_each_cell(tmp_path: Path) -> None:
    done, failed, lost = write(tmp_path / "j.jsonl")
    known = entry(tmp_path / "j.jsonl", done)
    assert (known.status, known.device) == ("done", "pixel")
    assert known.result == outcome(done).result
    assert entry(tmp_path / "j.jsonl", failed).status == "failed"
    with begun(tmp_path / "j.jsonl", TWO) as journal:
        assert journal.plan_run_id == ONE
        assert journal.lost() == {lost.key}
        assert journal.entry("0" * 64) is None
        assert journal.expected_s(done.key, done.group) == 2.5
        assert journal.expected_s("another session", done.group) == 2.5
        assert journal.expected_s(failed.key, failed.group) is None


def test_a_fresh_start_forgets_results_and_keeps_durations(tmp_path: Path) -> None:
    done, *_ = write(tmp_path / "j.jsonl")
    with begun(tmp_path / "j.jsonl", TWO, fresh=True) as journal:
        assert journal.plan_run_id == TWO
        assert journal.entry(done.key) is None
    with Journal(tmp_path / "j.jsonl") as journal:
        assert journal.plan_run_id == TWO
        assert journal.entry(done.key) is None
        assert journal.lost() == set()
        assert journal.expected_s(done.key, done.group) == 2.5


@given(st.data())
def test_cut_anywhere_it_holds_all_lines_before(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"
    write(path)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    lines = content[:cut].count(b"\n")
    with begun(path, TWO) as journal:
        assert journal.plan_run_id == (ONE if lines else TWO)
        journal.record_start("e" * 64, "pixel")
    kept = path.read_bytes().splitlines()
    assert len(kept) == max(lines, 1) + 1
    assert all(json.loads(line) for line in kept)


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", '{"event": "party"}', '{"event": "ended", "cell": "x"}', "[" * 100_000,
     '{"event": "plan", "format": 1, "campaign": "../x"}',
     '{"event": "ended", "cell": "c", "group": "g", "status": "odd", "run_id": null}'],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j.jsonl"
    write(path)
    with path.open("a") as sink:
        sink.write(line + "\n")
    with pytest.raises(JournalError, match="line 7 is damaged"):
        Journal(path).__enter__()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"event": "plan", "format": 2, "campaign": "' + ONE + '"}\n')
    with pytest.raises(JournalError, match="update qnnfarm"):
        Journal(path).__enter__()


def test_one_process_has_it_at_a_time_and_a_killed_one_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys, pathlib; from harness.plans.journal import Journal\n"
        "with Journal(pathlib.Path(sys.argv[1])): print('has it', flush=True); sys.stdin.read()"
    )
    with Started("-c", code, path) as holder:
        assert holder.stdout.readline() == "has it\n"
        with pytest.raises(WrongUseError, match="another `qnnfarm run`"):
            Journal(path).__enter__()
        holder.kill()
        holder.wait(timeout=200)
    with Journal(path):
        pass


def test_many_threads_share_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that begins after a line was written covers it, whoever asked for it."""
    todo, path = cells(40), tmp_path / "j.jsonl"
    syncing, syncs = threading.Event(), []
    real = os.fsync

    def slow(descriptor: int) -> None:
        syncs.append(path.stat().st_size)
        if len(syncs) == 2:  # the first is the beginning of the plan
            assert syncing.wait(200)
        real(descriptor)

    with Journal(path) as journal:
        monkeypatch.setattr(os, "fsync", slow)
        journal.begin("plan", ONE, fresh=False)
        threads = [
            threading.Thread(target=journal.record_ends, args=([outcome(cell)],)) for cell in todo
        ]
        for thread in threads:
            thread.start()
        while path.read_bytes().count(b"\n") < 41:
            threading.Event().wait(0.01)
        syncing.set()
        for thread in threads:
            thread.join()
    assert len(syncs) == 3
    assert syncs[-1] == path.stat().st_size
    with Journal(path) as journal:
        assert all(journal.entry(cell.key) for cell in todo)


def test_text_from_outside_stays_on_its_line(tmp_path: Path) -> None:
    (cell,) = cells(1)
    hostile = replace(outcome(cell), result=CellResult(summary='a\nb","\x00\ud800'))
    with begun(tmp_path / "j.jsonl") as journal:
        journal.record_ends([hostile])
    assert entry(tmp_path / "j.jsonl", cell).result == hostile.result


def test_another_database_or_file_has_another_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    one = journal_path("nightly", tmp_path / "a.yaml", "x.db")
    assert one.parent == tmp_path / "plans"
    assert one.name.startswith("nightly-")
    assert one == journal_path("nightly", tmp_path / "a.yaml", "x.db")
    assert one != journal_path("nightly", tmp_path / "b.yaml", "x.db")
    assert one != journal_path("nightly", tmp_path / "a.yaml", "y.db")


_FULL_DISK = """
import pathlib, resource, sys
from harness.errors import JournalError
from harness.plans.journal import Journal

path = pathlib.Path(sys.argv[1])
with Journal(path) as journal:
    journal.begin("plan", "1" * 32, fresh=False)
    journal.record_start("a" * 64, "pixel")
    most = path.stat().st_size + 40
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    for room in (most, resource.RLIM_INFINITY):  # as if somebody made room meanwhile
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            journal.record_start("b" * 64, "pixel")
        except JournalError as error:
            print(error.reason)
"""


def test_a_line_that_the_disk_cut_off_stays_the_last(tmp_path: Path) -> None:
    """Else it would damage the next, and with it the journal, for all runs to come."""
    path = tmp_path / "j.jsonl"
    with Started("-c", _FULL_DISK, path) as process:
        said, _ = process.communicate(timeout=200)
    assert len(said.splitlines()) == 2
    assert "File too large" in said
    assert not path.read_bytes().endswith(b"\n")
    with begun(path, TWO) as journal:
        assert journal.lost() == {"a" * 64}
        assert journal.plan_run_id == ONE


def test_nothing_counts_as_kept_that_was_not_brought_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is left at once (a second Ctrl-C) closes its journal while threads go on."""
    (cell,) = cells(1)
    path, written, told, syncs = tmp_path / "j.jsonl", threading.Event(), [], []
    real_write, real_sync = os.write, os.fsync

    def slow(descriptor: int, data: bytes) -> int:
        done = real_write(descriptor, data)
        written.set()
        time.sleep(0.3)
        return done

    def counted(descriptor: int) -> None:
        real_sync(descriptor)
        syncs.append(descriptor)

    def end(journal: Journal) -> None:
        try:
            journal.record_ends([outcome(cell)])
        except JournalError:
            told.append("refused")
        else:
            told.append("kept")

    with begun(path) as journal:
        monkeypatch.setattr(os, "write", slow)
        monkeypatch.setattr(os, "fsync", counted)
        thread = threading.Thread(target=end, args=(journal,))
        thread.start()
        assert written.wait(200)
        journal.close()
        thread.join()
    assert told == (["kept"] if syncs else ["refused"])


def test_what_the_disk_refused_once_is_not_kept_by_a_later_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a failed write-back once; a second fsync says that all is well."""
    first, second = cells(2)
    with begun(tmp_path / "j.jsonl") as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: os.close(-1))
            with pytest.raises(JournalError):
                journal.record_ends([outcome(first)])
        with pytest.raises(JournalError):
            journal.record_ends([outcome(second)])


def nightly(path: Path, campaign: str, todo: list[Cell], duration_s: float) -> None:
    with begun(path, campaign, fresh=True) as journal:
        for cell in todo:
            journal.record_start(cell.key, "pixel")
        journal.record_ends([outcome(cell, duration_s) for cell in todo])


def test_a_journal_that_is_begun_afresh_every_night_does_not_grow(tmp_path: Path) -> None:
    path, todo = tmp_path / "j.jsonl", cells(5)
    sizes = []
    for night in range(12):
        nightly(path, f"{night:032x}", todo[:4] if night else todo, 100.0 + night)
        sizes.append(path.stat().st_size)
    assert set(sizes[2:]) == {sizes[2]}
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ".lock"] == [path.name]
    with begun(path, TWO, fresh=True) as journal:
        for cell in todo[:4]:
            assert journal.expected_s(cell.key, cell.group) == 111.0
        assert journal.expected_s(todo[4].key, "") == 100.0  # of the night in which it was done
        assert journal.entry(todo[0].key) is None
        journal.record_ends([outcome(todo[0], 1.0)])
        assert journal.plan_run_id == TWO
    assert entry(path, todo[0]).duration_s == 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0.5, 9)), max_size=12))
def test_what_is_kept_says_the_same_of_every_cell_and_group(
    tmp_path_factory: pytest.TempPathFactory, ended: list[tuple[int, int, float]]
) -> None:
    """Sessions of one group end in any order, and more than once."""
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"
    (cell,) = cells(1)
    with begun(path) as journal:
        for key, group, seconds in ended:
            named = replace(cell, key=f"{key}" * 64, group=f"{group + 4}" * 64)
            journal.record_ends([outcome(named, seconds)])

    def known() -> list[float | None]:
        with Journal(path) as journal:
            keys = [f"{n}" * 64 for n in range(8)]
            return [journal.expected_s(key, "") for key in keys]

    before = known()
    for campaign in (TWO, ONE):
        with begun(path, campaign, fresh=True):
            pass
        assert known() == before


_CUT_DOWN = """
import os, pathlib, signal, sys
from harness.plans.journal import Journal

path, left = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def deadly(real, before):
    def call(*arguments, **named):
        global left
        left -= 1
        if left == 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*arguments, **named)
        finally:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return call

with Journal(path) as journal:
    for name in ("open", "write", "fsync", "replace", "rename", "close"):
        setattr(os, name, deadly(getattr(os, name), before=sys.argv[3] == "before"))
    journal.begin("plan", "2" * 32, fresh=True)
    os._exit(0)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_while_it_is_replaced_leaves_the_old_or_the_new_one_whole(
    tmp_path: Path, when: str
) -> None:
    path, campaigns = tmp_path / "j.jsonl", []
    todo = write(path)
    old = path.read_bytes()
    for number in range(1, 50):
        path.write_bytes(old)
        ended = Started("-c", _CUT_DOWN, path, str(number), when).wait(200)
        with Journal(path) as journal:
            campaigns.append(journal.plan_run_id)
            assert journal.expected_s(todo[0].key, todo[0].group) == 2.5
            assert path.read_bytes() == old or journal.plan_run_id == TWO
            assert (journal.entry(todo[0].key) is None) == (journal.plan_run_id == TWO)
        if ended == 0:
            break
    assert ended == 0
    assert set(campaigns) == {ONE, TWO}
    assert campaigns == sorted(campaigns)  # from one call on it is the new one


def test_a_journal_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = write(tmp_path / "j.jsonl")
    with Journal(tmp_path / "j.jsonl") as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: os.close(-1))
            with pytest.raises(JournalError):
                journal.begin("plan", TWO, fresh=True)
        assert journal.plan_run_id == ONE
    with Journal(tmp_path / "j.jsonl") as journal:
        assert journal.plan_run_id == ONE
        assert journal.entry(todo[0].key) is not None
