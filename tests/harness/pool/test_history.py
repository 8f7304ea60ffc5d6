from collections import Counter
from datetime import UTC, datetime

from sqlalchemy import Connection

from harness.pool.history import add_event
from tests.harness.pool.conftest import Bench, on_each_database

_DAY_S = 86_400.0
_BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()


def _begin(bench: Bench) -> None:
    bench.clock.set_by += _BEGAN - bench.clock.now()


def _lease(bench: Bench, *, days: int, per_day: int) -> None:
    """Add the events of leases, those of a day in one transaction."""

    def add(db: Connection) -> None:
        for _ in range(per_day):
            for what in ("granted", "released"):
                add_event(db, "a", bench.clock.now(), what, what)

    for _ in range(days):
        bench.database.write(add)
        bench.clock.set_by += _DAY_S


def test_history_says_what_happened(bench: Bench) -> None:
    bench.add("a")
    bench.ledger.release(bench.lease(1, "a"), ["a"])
    told = [f"{entry.what}: {entry.text}" for entry in bench.ledger.history("a")]
    assert told == [
        "added: ready: it answered",
        "granted: ready -> leased: held by process 1",
        "released: leased -> ready: released",
    ]


def test_history_has_no_bound_and_stays_small(bench: Bench) -> None:
    _begin(bench)
    bench.add("a", "b")
    _lease(bench, days=200, per_day=8)
    entries = bench.ledger.history("a")
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    kinds = Counter(entry.what for entry in entries)
    assert 4 <= kinds["month"] <= 5
    assert 60 <= kinds["day"] <= 93
    assert 500 <= kinds["granted"] + kinds["released"] <= 550
    assert sum(entry.counts.get("granted", 0) for entry in entries) + kinds["granted"] == 1600
    assert entries[0].counts == {"added": 1, "granted": 8, "released": 8}
    assert entries[0].text == "added 1, granted 8, released 8"
    assert datetime.fromtimestamp(entries[0].at, UTC) == datetime(2026, 1, 1, tzinfo=UTC)
    assert [entry.what for entry in bench.ledger.history("b")] == ["added"]


@on_each_database
def test_history_since_a_moment(bench: Bench) -> None:
    _begin(bench)
    bench.add("a")
    _lease(bench, days=60, per_day=8)
    since = bench.clock.now() - 40 * _DAY_S
    entries = bench.ledger.history("a", since=since)
    assert {entry.what for entry in entries} == {"day", "granted", "released"}
    assert since - _DAY_S < entries[0].at <= since
    assert bench.ledger.history("a", since=bench.clock.now()) == []
