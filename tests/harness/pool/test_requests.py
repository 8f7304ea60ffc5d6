"""Requests keep their place however short the TTL, notice what is freed, and say why they wait."""

from contextlib import closing
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from sqlalchemy import select

from harness.devices.spec import DeviceSpec
from harness.errors import LeaseTimeoutError
from harness.pool.config import PoolConfig, QuarantineConfig
from harness.pool.context import Heartbeat, PoolContext
from harness.pool.database import Database
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.owner import this_process
from harness.pool.pool import Acquisition
from harness.pool.records import Facts, tickets
from harness.pool.requirement import Requirement
from harness.pool.states import Event
from tests.clock import ManualClock
from tests.harness.pool.conftest import Bench, on_each_database, process

if TYPE_CHECKING:
    from harness.pool.opener import Opener


def test_a_place_in_the_queue_outlasts_the_shortest_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr("harness.pool.pool.time", SimpleNamespace(monotonic=clock.boottime))
    databases = [Database(tmp_path / "pool.db") for _ in range(2)]
    waiting, other = (
        Ledger(db, clock, ttl_s=ttl_s, rule=QuarantineConfig())
        for db, ttl_s in zip(databases, (1.0, 3600.0), strict=True)
    )
    other.record_found("a", "a", "spec:a", Facts())
    assert other.try_grant(other.enqueue(this_process(), ["a"], 1))
    seen: set[int] = set()
    waits = select(tickets.c.id).where(tickets.c.grant.is_(None))

    def wait(version: tuple[int, int], timeout_s: float) -> tuple[int, int]:
        clock.time += timeout_s
        other.reconcile()
        ids = databases[1].read(lambda db: list(db.scalars(waits)))
        assert len(ids) == 1
        seen.update(ids)
        return version

    monkeypatch.setattr(databases[0], "wait", wait)
    end = clock.time + 8.0
    opener = cast("Opener", None)  # nothing is granted
    context = PoolContext(PoolConfig(), clock, waiting, opener, Heartbeat(waiting))
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


@on_each_database
def test_a_device_that_is_freed_while_a_request_looks_at_the_queue_wakes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release comes after what the request sees, and before it waits for news."""
    stopped = SimpleNamespace(monotonic=bench.clock.boottime)  # no look is due by time
    monkeypatch.setattr("harness.pool.pool.time", stopped)
    bench.add("a")
    token = bench.lease(2, "a")
    other = Bench(bench.location)  # of another process
    look, looks = bench.ledger.try_grant, 0

    def look_as_it_is_freed(ticket: int) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            before = bench.database.version()
            assert look(ticket) is None
            other.ledger.release(token, ["a"])
            while bench.database.version() == before:
                sleep(0.01)

    monkeypatch.setattr(bench.ledger, "try_grant", look_as_it_is_freed)
    polls = iter(range(20))
    members = {"a": Member("a", DeviceSpec("android", "a"))}
    with closing(other.database), pytest.raises(LeaseTimeoutError):
        Acquisition(bench.context(), process(1), Requirement(), lambda: members).run(
            timeout_s=None,
            while_waiting=lambda: None,
            cancelled=lambda: looks > 1 or next(polls, None) is None,
        )
    assert looks == 2
    assert next(polls, None) is not None  # it was woken, and did not come to an end


def test_a_lease_timeout_says_who_held_each_device(bench: Bench) -> None:
    bench.add("a", "b", "c")
    bench.lease(2, "a")
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
