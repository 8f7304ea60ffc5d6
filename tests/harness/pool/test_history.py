from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from harness.pool.database import FORMAT
from harness.pool.failure_policy import FailureReport
from harness.pool.states import Event
from tests.harness.pool.conftest import Bench
from tests.harness.pool.old_formats import downgrade

Grab = Callable[..., int]
_DAY_S = 86_400.0
_BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()


def _begin(bench: Bench) -> None:
    bench.clock.set_by += _BEGAN - bench.clock.now()


def _lease(bench: Bench, grab: Grab, *, days: int, per_day: int) -> None:
    for _ in range(days):
        for _ in range(per_day):
            bench.ledger.leases.release(grab(1, "a"), ["a"])
        bench.clock.set_by += _DAY_S


def test_history_says_what_happened(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    bench.ledger.leases.release(grab(1, "a"), ["a"])
    told = [f"{entry.what}: {entry.text}" for entry in bench.ledger.devices.history("a")]
    assert told == [
        "added: ready: it answered",
        "granted: ready -> leased: held by process 1",
        "released: leased -> ready: released",
    ]


def test_history_has_no_bound_and_stays_small(bench: Bench, grab: Grab) -> None:
    _begin(bench)
    bench.add("a", "b")
    _lease(bench, grab, days=200, per_day=8)
    entries = bench.ledger.devices.history("a")
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    kinds = Counter(entry.what for entry in entries)
    assert 4 <= kinds["month"] <= 5
    assert 60 <= kinds["day"] <= 93
    assert 500 <= kinds["granted"] + kinds["released"] <= 550
    assert sum(entry.counts.get("granted", 0) for entry in entries) + kinds["granted"] == 1600
    assert entries[0].counts == {"added": 1, "granted": 8, "released": 8}
    assert entries[0].text == "added 1, granted 8, released 8"
    assert datetime.fromtimestamp(entries[0].at, UTC) == datetime(2026, 1, 1, tzinfo=UTC)
    assert [entry.what for entry in bench.ledger.devices.history("b")] == ["added"]


def test_history_since_a_moment(bench: Bench, grab: Grab) -> None:
    _begin(bench)
    bench.add("a")
    _lease(bench, grab, days=200, per_day=8)
    since = bench.clock.now() - 40 * _DAY_S
    entries = bench.ledger.devices.history("a", since=since)
    assert {entry.what for entry in entries} == {"day", "granted", "released"}
    assert since - _DAY_S < entries[0].at <= since
    assert bench.ledger.devices.history("a", since=bench.clock.now()) == []


def test_a_ledger_of_the_fourth_format_keeps_its_events(bench: Bench, grab: Grab) -> None:
    _begin(bench)
    bench.add("a")
    token = grab(1, "a")
    lost = FailureReport("DeviceLostError", 1.0, recover=True, text="it went away")
    bench.ledger.leases.report("a", token, lost)
    bench.ledger.leases.release(token, ["a"])
    bench.ledger.devices.apply("a", Event.RECOVERED, "it answers")
    before = bench.ledger.devices.history("a")
    with bench.database.writing() as db:
        downgrade(db, 4)
    bench.database.close()
    assert bench.ledger.devices.history("a") == before
    _lease(bench, grab, days=1, per_day=1)
    with bench.database.reading() as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == FORMAT
