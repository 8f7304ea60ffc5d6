"""What the scheduler asks the pool for, where not every device will do, or not all can be had."""

import itertools
from dataclasses import replace

import pytest

from harness.errors import DeviceLostError
from harness.plans.scheduler import MatrixOptions, run_matrix
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from tests.harness.plans.farm import (
    HandClock,
    HandJournal,
    HandPool,
    HandRunner,
    cells,
    members,
    statuses,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    made = HandClock()
    monkeypatch.setattr("harness.plans.lease_requests.time", made)
    return made


@pytest.mark.parametrize("known", [True, False], ids=["away", "refused"])
def test_a_device_that_cannot_be_had_is_no_other_to_try_again_on(
    journal: HandJournal, *, known: bool
) -> None:
    """One that the plan sees is absent, and one that the pool alone knows is full."""
    there, other = members("a", "b")
    tries = itertools.count()

    def fails_once(*_: object) -> None:
        if not next(tries):
            raise DeviceLostError("serial-of-a", "a push", "closed")

    if known:
        pool = HandPool([there, replace(other, state=MemberState.ABSENT)], away={"b"})
    else:
        pool = HandPool([there, other], refused={"b"})
    runner, options = HandRunner(fails_once), MatrixOptions(lease_s=60)
    summary = run_matrix(cells(1), pool, runner, journal, options=options)
    assert statuses(summary) == {"cell-0": "done"}
    assert [member for _, member in runner.ran] == ["a", "a"]


@pytest.mark.parametrize(("limit", "taken"), [(None, 20), (1, 1), (2, 3)])
def test_requests_for_what_others_hold_do_not_keep_the_rest_waiting(
    journal: HandJournal, clock: HandClock, limit: int | None, taken: int
) -> None:
    names = [f"d{number:02}" for number in range(25)]
    todo = [
        cell
        for number, name in enumerate(names)
        for cell in cells(1, Requirement(name=name), first=number)
    ]
    states = [MemberState.LEASED] * taken + [MemberState.READY] * (25 - taken)
    there = [replace(m, state=s) for m, s in zip(members(*names), states, strict=True)]
    pool = HandPool(there, away=set(names[:taken]))
    done = itertools.count(1)

    def and_time_passes(*_: object) -> None:
        if next(done) == len(names) - taken:
            clock.step = 1.0

    options = MatrixOptions(max_parallel=limit, lease_s=2)
    summary = run_matrix(todo, pool, HandRunner(and_time_passes), journal, options=options)
    assert [o.status for o in summary.outcomes] == ["failed"] * taken + ["done"] * (25 - taken)


def test_cells_waiting_for_our_limit_are_not_without_a_device(
    journal: HandJournal, clock: HandClock
) -> None:
    todo = cells(4, Requirement(name="a")) + cells(1, Requirement(name="b"), first=4)
    runner = HandRunner(lambda *_: clock.turn(0.5))
    options = MatrixOptions(max_parallel=1, lease_s=0.7)
    summary = run_matrix(todo, HandPool(members("a", "b")), runner, journal, options=options)
    assert set(statuses(summary).values()) == {"done"}
