"""Waiting requests keep their place however short the TTL, and say what they wait for."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from sqlalchemy import select

from harness.devices.spec import DeviceSpec
from harness.errors import LeaseTimeoutError
from harness.pool.acquisition import Acquisition
from harness.pool.config import PoolConfig
from harness.pool.context import Changes, PoolContext
from harness.pool.database import Database
from harness.pool.failure_policy import QuarantineRule
from harness.pool.heartbeat import Heartbeat
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.owner import this_process
from harness.pool.records import Facts
from harness.pool.requirement import Requirement
from harness.pool.schema import tickets
from harness.pool.states import Event
from tests.clock import ManualClock
from tests.harness.pool.conftest import Bench, process

if TYPE_CHECKING:
    from harness.pool.fence import FenceClaims
    from harness.pool.opener import Opener


class _TimePasses(Changes):
    """No changes; waiting lets time pass on the clock, then calls `look`."""

    def __init__(self, clock: ManualClock, look: Callable[[], None]) -> None:
        super().__init__()
        self._clock = clock
        self._look = look

    def wait_beyond(self, count: int, timeout_s: float) -> bool:
        self._clock.time += timeout_s
        self._look()
        return self.count > count


def test_a_place_in_the_queue_outlasts_the_shortest_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr("harness.pool.acquisition.time", SimpleNamespace(monotonic=clock.boottime))
    databases = [Database(tmp_path / "pool.db") for _ in range(2)]
    waiting, other = (
        Ledger(db, clock, ttl_s=ttl_s, rule=QuarantineRule())
        for db, ttl_s in zip(databases, (1.0, 3600.0), strict=True)
    )
    other.record_found("a", "a", "spec:a", Facts())
    assert other.try_grant(other.enqueue(this_process(), ["a"], 1), this_process())
    seen: set[int] = set()
    waits = select(tickets.c.id).where(tickets.c.token.is_(None))

    def look() -> None:
        other.reconcile()
        ids = databases[1].read(lambda db: list(db.scalars(waits)))
        assert len(ids) == 1
        seen.update(ids)

    end = clock.time + 20.0
    context = PoolContext(
        PoolConfig(),
        clock,
        waiting,
        cast("Opener", None),
        Heartbeat(waiting),
        cast("FenceClaims", None),  # nothing is granted
        _TimePasses(clock, look),
    )
    members = {"a": Member("a", DeviceSpec("android", "a"))}
    try:
        with pytest.raises(LeaseTimeoutError):
            Acquisition(context, this_process(), Requirement(), lambda: members).run(
                timeout_s=None, while_waiting=lambda: None, cancelled=lambda: clock.time >= end
            )
    finally:
        for database in databases:
            database.close()
    assert len(seen) == 1


def test_a_lease_timeout_says_who_held_each_device(bench: Bench, grab: Callable[..., int]) -> None:
    bench.add("a", "b", "c")
    grab(2, "a")
    bench.ledger.apply("b", Event.DRAIN, "a new battery")
    members = {name: Member(name, DeviceSpec("android", name)) for name in "abc"}
    with pytest.raises(LeaseTimeoutError) as caught:
        Acquisition(bench.context(), process(1), Requirement(count=3), lambda: members).run(
            timeout_s=0, while_waiting=lambda: None, cancelled=lambda: False
        )
    a, b, c = caught.value.reason.split("; ")
    assert a.startswith("a is held by process 2 since ")
    assert b.startswith("b is draining (a new battery) since ")
    assert c == "c is ready, but not granted yet"
