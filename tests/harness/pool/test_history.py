import pytest
from sqlalchemy import Connection

from harness.pool import history
from tests.harness.pool.conftest import Bench, on_each_database


def test_history_says_what_happened(bench: Bench) -> None:
    bench.add("a")
    bench.ledger.release(bench.lease(1, "a"), ["a"])
    told = [f"{entry.what}: {entry.text}" for entry in bench.ledger.history("a")]
    assert told == [
        "added: ready: it answered",
        "granted: ready -> leased: held by process 1",
        "released: leased -> ready: released",
    ]


@on_each_database
def test_history_stays_small_and_leases_push_out_no_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_EVENTS", 20)
    bench.add("a", "b")

    def add(db: Connection) -> None:
        history.add_event(db, "a", 1.0, "counted: RunnerError", "it crashed")
        for number in range(160):
            for what in ("granted", "released"):
                history.add_event(db, "a", 2.0 + number, what, f"lease {number}")

    bench.database.write(add)
    added, failed, *leases = bench.ledger.history("a")
    assert (added.what, failed.what, failed.text) == ("added", "counted: RunnerError", "it crashed")
    assert 40 <= len(leases) <= 140
    assert leases[-1].text == "lease 159"
    assert [entry.what for entry in bench.ledger.history("b")] == ["added"]
    late = {entry.text for entry in bench.ledger.history("a", since=160.0)}
    assert late == {added.text, "lease 158", "lease 159"}
