"""Reservations: who gets a device in that time, and what becomes of who has it."""

from datetime import datetime, timedelta

import pytest

from harness.cli.pool import parse_duration, parse_start
from harness.errors import WrongUseError
from harness.pool.records import Facts
from tests.harness.pool.conftest import Bench, on_each_database, process

HOUR_S = 3600.0


def reserve(bench: Bench, pid: int, *keys: str, after_s: float = 0.0) -> list[int]:
    start = bench.clock.now() + after_s
    obstacles = bench.ledger.reserve(keys, process(pid).user, start, HOUR_S)
    return [reservation.number for reservation in obstacles]


def is_granted(bench: Bench, ticket: int) -> bool:
    return bool(bench.ledger.try_grant(ticket))


def test_a_reserved_device_is_leased_to_nobody_else_until_the_time_ends(bench: Bench) -> None:
    bench.add("a")
    assert reserve(bench, 1, "a") == []
    other, own = bench.ask(2, "a"), bench.ask(1, "a")
    assert not is_granted(bench, other)
    rows = bench.ledger.try_grant(own)
    assert rows
    bench.ledger.release(rows[0].grant, ["a"])
    assert not is_granted(bench, other)
    bench.clock.time += HOUR_S
    assert is_granted(bench, bench.ask(2, "a"))


def test_who_waits_for_a_reserved_device_holds_back_no_other(bench: Bench) -> None:
    bench.add("a", "b")
    reserve(bench, 1, "a")
    both, one = (bench.ask(2, "a", "b", count=count) for count in (2, 1))
    assert not is_granted(bench, both)
    assert is_granted(bench, one)


@on_each_database
def test_a_lease_of_somebody_else_ends_when_the_time_begins(bench: Bench) -> None:
    bench.add("a", "b")
    reserve(bench, 1, "a", "b", after_s=10.0)
    others, own = bench.lease(2, "a"), bench.lease(1, "b")
    bench.clock.time += 9
    assert None not in bench.ledger.renew({others: 1, own: 1}).values()
    bench.clock.time += 1
    renewed = bench.ledger.renew({others: 1, own: 1})
    assert renewed[others] is None
    assert renewed[own] is not None
    assert "it is reserved by process 1 from" in bench.ledger.why_lost(others, ["a"])
    assert bench.state("a") == "ready"
    assert is_granted(bench, bench.ask(1, "a"))


@on_each_database
def test_who_waits_ends_the_lease_of_a_holder_that_sleeps(bench: Bench) -> None:
    bench.add("a")
    bench.lease(2, "a")
    ticket = bench.ask(1, "a")
    assert not is_granted(bench, ticket)
    reserve(bench, 1, "a")
    assert is_granted(bench, ticket)


def test_a_drained_device_is_taken_from_its_holder_too(bench: Bench) -> None:
    bench.add("a")
    token = bench.lease(2, "a")
    bench.sql("UPDATE pool_devices SET state = 'draining'")
    reserve(bench, 1, "a")
    assert not bench.ledger.holds(token, "a")
    assert bench.state("a") == "draining"


def test_a_repair_goes_on_in_a_reserved_time(bench: Bench) -> None:
    key = bench.ledger.record_absent("a", "a", "gone")
    lease = bench.begin_repair(key, force=True)
    reserve(bench, 1, key)
    assert bench.ledger.holds(lease.grant, key)


@on_each_database
def test_nobody_reserves_what_another_has_for_a_part_of_that_time(bench: Bench) -> None:
    bench.add("a", "b")
    assert reserve(bench, 1, "a", after_s=100.0) == []
    assert reserve(bench, 1, "a", after_s=100.0) == []  # tried again, as after a server's restart
    assert len(bench.ledger.rows(["a"])["a"].reservations) == 1
    (number,) = reserve(bench, 2, "b", "a", after_s=50.0)
    assert bench.ledger.rows(["b"])["b"].reservations == ()
    assert reserve(bench, 2, "a", after_s=100.0 + HOUR_S) == []
    cancelled = bench.ledger.cancel_reservation(number, "bob")
    assert cancelled is not None
    assert (cancelled.key, cancelled.user) == ("a", "process 1")
    assert bench.ledger.cancel_reservation(number, "bob") is None
    assert reserve(bench, 2, "a", after_s=50.0) == []


@on_each_database
def test_a_reservation_follows_a_device_that_says_who_it_is(bench: Bench) -> None:
    key = bench.ledger.record_absent("a", "android:a", "not looked at", probed=False)
    reserve(bench, 1, key)
    bench.ledger.record_found("hardware:1", "a", "android:a", Facts())
    assert not is_granted(bench, bench.ask(2, "hardware:1"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1d2h3m", 93_780)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0m", "2", "-1h", "32d", "1.5h", "h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(WrongUseError, match="--for"):
        parse_duration(text)


def test_a_time_is_the_next_one_of_that_name() -> None:
    now = datetime(2026, 11, 24, 13, 30)  # noqa: DTZ001 - local
    later, tomorrow = parse_start("14:00", now), parse_start("13:00", now)
    assert later == (now + timedelta(minutes=30)).timestamp()
    assert tomorrow == (now + timedelta(hours=23, minutes=30)).timestamp()
    assert parse_start("2026-11-24T13:30", now) == now.timestamp()
    assert parse_start(None, now) is None
    with pytest.raises(WrongUseError, match="--at"):
        parse_start("25:00", now)
