"""Requests keep their place however short the TTL, notice what is freed, and say why they wait."""

from collections.abc import Callable
from contextlib import closing
from time import sleep
from types import SimpleNamespace

import pytest

from harness.devices.spec import DeviceSpec
from harness.errors import LeaseTimeoutError
from harness.pool.members import Member
from harness.pool.pool import Acquisition
from harness.pool.requirement import Requirement
from harness.pool.states import Event
from tests.harness.pool.conftest import Bench, on_each_database, process


def request(bench: Bench, keys: str, cancelled: Callable[[], bool]) -> str:
    """Wait for all of these devices until it is cancelled; give what it waited for."""
    members = {key: Member(key, DeviceSpec("android", key)) for key in keys}
    asked = Requirement(count=len(keys))
    with pytest.raises(LeaseTimeoutError) as caught:
        Acquisition(bench.context(), process(1), asked, lambda: members).run(
            timeout_s=None, while_waiting=lambda: None, cancelled=cancelled
        )
    return caught.value.reason


@pytest.fixture(autouse=True)
def manual_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No look is due by time, unless a test lets it pass."""
    own_time = SimpleNamespace(monotonic=bench.clock.boottime)
    monkeypatch.setattr("harness.pool.pool.time", own_time)


def test_a_place_in_the_queue_outlasts_the_shortest_ttl(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add("a")
    bench.lease(2, "a")
    bench.ledger.ttl_s = 1.0
    seen: set[int] = set()

    def wait(version: tuple[int, int], timeout_s: float) -> tuple[int, int]:
        bench.clock.time += timeout_s
        bench.ledger.reconcile()
        ((ticket,),) = bench.sql('SELECT id FROM pool_tickets WHERE "grant" IS NULL')
        seen.add(ticket)
        return version

    monkeypatch.setattr(bench.database, "wait", wait)
    end = bench.clock.time + 8.0
    request(bench, "a", lambda: bench.clock.time >= end)
    assert len(seen) == 1


@on_each_database
def test_a_device_that_is_freed_while_a_request_looks_at_the_queue_wakes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release comes after what the request sees, and before it waits for news."""
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
    with closing(other.database):
        request(bench, "a", lambda: looks > 1 or next(polls, None) is None)
    assert looks == 2
    assert next(polls, None) is not None  # it was woken, and did not come to an end


def test_a_lease_timeout_says_who_held_each_device(bench: Bench) -> None:
    bench.add("a", "b", "c")
    bench.lease(2, "a")
    bench.ledger.apply("b", Event.DRAIN, "a new battery")
    a, b, c = request(bench, "abc", lambda: True).split("; ")
    assert a.startswith("a is held by process 2 since ")
    assert b.startswith("b is draining (a new battery) since ")
    assert c == "c is ready, but not granted yet"
