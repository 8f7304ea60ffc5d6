"""The scheduler over a pool and a runner by hand: what runs where, how often, and how it ends."""

import _thread
import itertools
import os
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import (
    DeviceCommandError,
    DeviceLostError,
    FailureClass,
    HarnessError,
    LeaseLostError,
    RunnerError,
    RuntimeOutputError,
    StoreUnavailableError,
)
from harness.plans import cell_queue, lease_requests, outcome_log, scheduler
from harness.plans.cancellation import CancelToken
from harness.plans.cells import Cell, make_cell
from harness.plans.outcome import CellOutcome, CellResult, Summary
from harness.plans.plan_file import Retries
from harness.plans.scheduler import MatrixOptions, run_matrix
from harness.pool.requirement import Requirement
from harness.workloads.command import Command
from tests.harness.plans.farm import (
    HandClock,
    HandJournal,
    HandPool,
    HandRunner,
    cells,
    members,
    statuses,
)
from tests.harness.pool.interrupts import Interrupter


def test_every_cell_runs_once_and_no_lease_stays(journal: HandJournal) -> None:
    pool, runner = HandPool(members(*"abcd")), HandRunner()
    todo = cells(100)
    summary = run_matrix(todo, pool, runner, journal)
    assert summary.exit_code == 0
    assert [o.cell for o in summary.outcomes] == todo
    assert set(runner.tries.values()) == {1}
    assert len(runner.ran) == 100
    assert runner.collisions == 0
    assert pool.held == set()
    assert [journal.ends[cell.key].status for cell in todo] == ["done"] * 100


def test_devices_are_used_side_by_side_up_to_the_limit(journal: HandJournal) -> None:
    together = threading.Barrier(3)
    pool = HandPool(members(*"abcde"))
    runner = HandRunner(lambda *_: together.wait(200))
    options = MatrixOptions(max_parallel=3)
    summary = run_matrix(cells(9), pool, runner, journal, options=options)
    assert summary.exit_code == 0
    assert pool.most_held == 3


def test_a_device_stays_leased_for_its_next_cells(journal: HandJournal) -> None:
    pool = HandPool(members("a"))
    run_matrix(cells(50), pool, HandRunner(), journal)
    assert pool.leases == 1


def test_a_cell_that_lost_its_device_is_run_on_another(journal: HandJournal) -> None:
    def fails_on_a(cell: Cell, member: str, _token: CancelToken) -> None:
        if member == "a":
            raise DeviceLostError("serial-of-a", "a push", "closed")

    pool, runner = HandPool(members("a", "b")), HandRunner(fails_on_a)
    summary = run_matrix(cells(6), pool, runner, journal)
    assert summary.exit_code == 0
    assert {outcome.device for outcome in summary.outcomes} == {"b"}
    failed_on_a = [label for label, member in runner.ran if member == "a"]
    assert len(failed_on_a) == len(set(failed_on_a))
    assert pool.reports == [("a", "DeviceLostError")] * len(failed_on_a)
    retried = [o for o in summary.outcomes if o.failures]
    assert {o.failures[0][0] for o in retried} <= {"a"}


def test_a_cell_that_fails_alike_on_two_devices_is_not_tried_again(journal: HandJournal) -> None:
    def fails(cell: Cell, member: str, _token: CancelToken) -> None:
        if cell.label == "cell-1":
            raise DeviceLostError(f"serial-of-{member}", "a push", "closed")

    pool, runner, todo = HandPool(members(*"abcd")), HandRunner(fails), cells(3)
    pool.blamed = {todo[1].work}
    summary = run_matrix(todo, pool, runner, journal)
    assert statuses(summary) == {"cell-0": "done", "cell-1": "failed", "cell-2": "done"}
    assert runner.tries["cell-1"] == 2
    assert summary.exit_code == 1
    (_, first), (_, second) = summary.outcomes[1].failures
    assert (first.kind, second.kind) == (FailureClass.DEVICE, FailureClass.RUNNER)
    assert "closed; it fails alike on " in second.reason
    assert second.reason.endswith("the cell is at fault, not the devices")
    assert sorted(pool.ended_well) == ["cell cell-0", "cell cell-2"]


def test_with_one_device_alone_it_is_tried_again_there(journal: HandJournal) -> None:
    count = itertools.count()

    def fails_once(*_: object) -> None:
        if next(count) == 0:
            raise DeviceLostError("serial-of-a", "a push", "closed")

    summary = run_matrix(cells(1), HandPool(members("a")), HandRunner(fails_once), journal)
    assert statuses(summary) == {"cell-0": "done"}


def test_a_cell_whose_lease_was_taken_runs_again_and_nothing_counts(journal: HandJournal) -> None:
    count = itertools.count()

    def loses(*_: object) -> None:
        if next(count) < 4:
            raise LeaseLostError("a", 7, "ann took it back")
        if next(count) < 8:  # which has all its own tries left
            raise DeviceLostError("serial-of-a", "a push", "closed")

    pool, runner = HandPool(members("a", "b")), HandRunner(loses)
    summary = run_matrix(cells(1), pool, runner, journal)
    assert statuses(summary) == {"cell-0": "done"}
    kinds = [failure.kind for _, failure in summary.outcomes[0].failures]
    assert kinds == [FailureClass.LEASE] * 4 + [FailureClass.DEVICE] * 2
    assert len({member for _, member in runner.ran[:5]}) == 1  # no device is avoided for it


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (DeviceLostError("s", "a push", "closed"), 3),
        (LeaseLostError("s", 7, "its fence is gone"), 11),
        (RunnerError("s", "genie", "crashed", 139, ""), 2),
        (RuntimeOutputError("s", "garbage"), 1),
        (DeviceCommandError("s", "false", 1, ""), 1),
    ],
    ids=lambda value: getattr(type(value), "__name__", str(value)),
)
def test_tries_depend_on_whose_fault_it_is(
    journal: HandJournal, error: HarnessError, tries: int
) -> None:
    def fails(cell: Cell, *_: object) -> None:
        if cell.label == "cell-1":
            raise error

    runner = HandRunner(fails)
    summary = run_matrix(cells(3), HandPool(members(*"abc")), runner, journal)
    assert runner.tries["cell-1"] == tries
    assert statuses(summary) == {"cell-0": "done", "cell-1": "failed", "cell-2": "done"}
    assert summary.exit_code == 1
    failed = summary.outcomes[1]
    assert [f.error for _, f in failed.failures] == [type(error).__name__] * tries


def test_a_kind_of_device_that_is_not_there_fails_its_cells_alone(journal: HandJournal) -> None:
    todo = cells(3) + cells(2, Requirement(soc="SM8650"), first=3)
    summary = run_matrix(todo, HandPool(members("a")), HandRunner(), journal)
    assert list(statuses(summary).values()) == ["done"] * 3 + ["failed"] * 2
    failure = summary.outcomes[-1].failure
    assert failure is not None
    assert (failure.kind, failure.error) == (FailureClass.DEVICE, "RequirementError")
    assert "SM8650" in failure.reason
    assert summary.exit_code == 1


def test_nothing_measured_for_want_of_devices_is_told_from_failures(journal: HandJournal) -> None:
    def lost(*_: object) -> None:
        raise DeviceLostError("s", "a push", "closed")

    pool = HandPool(members("a"))
    assert run_matrix(cells(2), pool, HandRunner(lost), journal).exit_code == 2
    nobody = cells(2, Requirement(soc="SM8650"))
    assert run_matrix(nobody, pool, HandRunner(), journal).exit_code == 2


def test_no_device_free_in_time_fails_the_cells(journal: HandJournal) -> None:
    pool = HandPool(members("a"))
    with pool.acquire(Requirement(), cancelled=lambda: False):
        options = MatrixOptions(lease_s=0.01)
        summary = run_matrix(cells(2), pool, HandRunner(), journal, options=options)
    failures = [outcome.failure for outcome in summary.outcomes if outcome.failure]
    assert [failure.error for failure in failures] == ["LeaseTimeoutError"] * 2
    assert "no device was free" in failures[0].reason
    assert summary.exit_code == 2


def test_a_cell_that_waits_again_begins_to_wait_then(
    journal: HandJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr("harness.plans.lease_requests.time", clock)
    pool = HandPool(members("a"))
    tries = itertools.count()

    def lost_at_last(cell: Cell, member: str, token: CancelToken) -> None:
        if not next(tries):
            clock.turn(1.5)  # longer than cells wait for a device
            raise DeviceLostError("s", "a push", "closed")

    options = MatrixOptions(lease_s=1.0)
    summary = run_matrix(cells(1), pool, HandRunner(lost_at_last), journal, options=options)
    assert [failure.error for _, failure in summary.outcomes[0].failures] == ["DeviceLostError"]
    assert summary.exit_code == 0


def spread(count: int) -> list[Cell]:
    work = Command(command=("true",))
    return [
        make_cell(f"r@{n}", work, Requirement(soc="SM8750"), replica=n, spread=True)
        for n in range(count)
    ]


def test_replicas_go_onto_different_devices(journal: HandJournal) -> None:
    runner = HandRunner()
    summary = run_matrix(spread(4), HandPool(members(*"abcd")), runner, journal)
    assert summary.exit_code == 0
    assert {member for _, member in runner.ran} == set("abcd")


def test_more_replicas_than_devices_fail_with_the_reason(journal: HandJournal) -> None:
    summary = run_matrix(spread(3), HandPool(members(*"ab")), HandRunner(), journal)
    assert sorted(statuses(summary).values()) == ["done", "done", "failed"]
    failure = next(o.failure for o in summary.outcomes if o.failure)
    assert "lower its `count`" in failure.reason


def test_finished_cells_are_not_run_again(journal: HandJournal) -> None:
    todo = cells(4)
    result = CellResult(run_id="f" * 32, summary="as before")
    before = {todo[1].key: CellOutcome(todo[1], "done", resumed=True, result=result)}
    runner = HandRunner()
    summary = run_matrix(todo, HandPool(members("a")), runner, journal, done=before)
    assert runner.tries == {"cell-0": 1, "cell-2": 1, "cell-3": 1}
    assert [o.resumed for o in summary.outcomes] == [False, True, False, False]
    assert summary.outcomes[1].result.summary == "as before"
    assert summary.exit_code == 0


def test_a_cell_that_takes_too_long_is_ended_and_tried_elsewhere(journal: HandJournal) -> None:
    def hangs_on_a(cell: Cell, member: str, token: CancelToken) -> None:
        if member == "a":
            ended = threading.Event()
            with token.on_cancel(ended.set):
                assert ended.wait(200)
                token.check()

    todo = cells(1, Requirement(), timeout_s=0.05)
    pool, runner = HandPool(members("a", "b")), HandRunner(hangs_on_a)
    summary = run_matrix(todo, pool, runner, journal)
    (outcome,) = summary.outcomes
    assert (outcome.status, outcome.device) == ("done", "b")
    assert outcome.failures[0][1].error == "DeviceTimeoutError"


def test_an_interrupt_ends_what_runs_and_leaves_the_rest(journal: HandJournal) -> None:
    started = threading.Barrier(2)

    def interrupted(cell: Cell, member: str, token: CancelToken) -> None:
        ended = threading.Event()
        with token.on_cancel(ended.set):
            if started.wait(200) == 0:
                _thread.interrupt_main()
            assert ended.wait(200)
            token.check()

    pool, runner = HandPool(members("a", "b")), HandRunner(interrupted)
    summary = run_matrix(cells(5), pool, runner, journal)
    assert summary.interrupted
    assert sorted(statuses(summary).values()) == ["interrupted"] * 2 + ["left"] * 3
    assert len(runner.ran) == 2
    assert pool.held == set()
    assert summary.exit_code == 130


def test_a_second_interrupt_goes_at_once(journal: HandJournal) -> None:
    release = threading.Event()

    def deaf(cell: Cell, member: str, token: CancelToken) -> None:
        with token.on_cancel(_thread.interrupt_main):  # the first brings the second
            _thread.interrupt_main()
            release.wait(200)

    with pytest.raises(KeyboardInterrupt):
        run_matrix(cells(1), HandPool(members("a")), HandRunner(deaf), journal)
    release.set()


@pytest.mark.parametrize("error", [StoreUnavailableError("db", "no space"), ZeroDivisionError()])
def test_an_unwritable_journal_or_a_bug_ends_the_run(
    journal: HandJournal, error: Exception
) -> None:
    def fails(cell: Cell, *_: object) -> None:
        if cell.label == "cell-2":
            raise error

    pool = HandPool(members("a", "b"))
    with pytest.raises(type(error)):
        run_matrix(cells(50), pool, HandRunner(fails), journal)
    assert pool.held == set()


@given(
    devices=st.integers(1, 5),
    count=st.integers(1, 30),
    fates=st.dictionaries(
        st.tuples(st.integers(0, 29), st.integers(0, 2)),
        st.sampled_from([DeviceLostError("s", "x", "y"), RunnerError("s", "x", "y", 1, ""),
                         RuntimeOutputError("s", "x")]),
    ),
)  # fmt: skip
def test_whatever_fails_each_cell_ends_once_and_all_leases_end(
    devices: int, count: int, fates: dict[tuple[int, int], HarnessError]
) -> None:
    numbers = {f"cell-{n}": n for n in range(count)}
    runner = HandRunner()

    def fate(cell: Cell, *_: object) -> None:
        error = fates.get((numbers[cell.label], runner.tries[cell.label] - 1))
        if error is not None:
            raise error

    runner._action = fate
    pool = HandPool(members(*(f"d{n}" for n in range(devices))))
    summary = run_matrix(cells(count, retries=Retries()), pool, runner, HandJournal())
    assert pool.held == set()
    assert runner.collisions == 0
    for outcome in summary.outcomes:
        number = numbers[outcome.cell.label]
        limits = {"DeviceLostError": 2, "RunnerError": 1, "RuntimeOutputError": 0}
        seen: dict[str, int] = {}
        expected = "done"
        for error in (fates.get((number, n)) for n in range(4)):
            if error is None:
                break
            kind = type(error).__name__
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] > limits[kind]:
                expected = "failed"
                break
        assert outcome.status == expected
        assert runner.tries[outcome.cell.label] == sum(seen.values()) + (expected == "done")


def test_ctrl_c_at_any_line_leaves_no_lease_and_a_journal_that_is_true() -> None:
    modules = (cell_queue, lease_requests, outcome_log, scheduler)
    todo = cells(3, Requirement(name="a")) + cells(2, Requirement(name="b"), first=3)
    todo += cells(1, Requirement(name="nobody"), first=5)
    step = 3 if os.environ.get("CI") else 12
    for number in itertools.count(random.randint(1, step), step):  # noqa: S311
        pool, runner = HandPool(members("a", "b")), HandRunner()
        summaries: list[Summary] = []
        interrupter = Interrupter(number, *modules)
        journal = HandJournal()

        def run(journal: HandJournal = journal) -> None:
            summaries.append(run_matrix(todo, pool, runner, journal))  # noqa: B023

        raised = interrupter.run(run)
        deadline = time.monotonic() + 120
        while pool.held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.held == set(), interrupter.where
        done = {key for key, end in journal.ends.items() if end.status == "done"}
        ran = {label for label, _ in runner.ran}
        for cell in todo:
            assert cell.key not in done or cell.label in ran, interrupter.where
            if not raised:
                (outcome,) = [o for o in summaries[0].outcomes if o.cell == cell]
                assert (outcome.status == "done") == (cell.key in done), interrupter.where
        if not interrupter.where:
            break
    assert statuses(summaries[0])["cell-5"] == "failed"
    assert number > 100
