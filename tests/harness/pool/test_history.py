from sqlalchemy import Connection

from harness.pool.history import add_event
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
def test_history_stays_small_and_leases_push_out_no_failure(bench: Bench) -> None:
    bench.add("a", "b")

    def add(db: Connection) -> None:
        add_event(db, "a", 1.0, "counted: RunnerError", "it crashed")
        for number in range(1600):
            for what in ("granted", "released"):
                add_event(db, "a", 2.0 + number, what, f"lease {number}")

    bench.database.write(add)
    added, failed, *leases = bench.ledger.history("a")
    assert (added.what, failed.what, failed.text) == ("added", "counted: RunnerError", "it crashed")
    assert 1000 <= len(leases) <= 1100
    assert leases[-1].text == "lease 1599"
    assert [entry.what for entry in bench.ledger.history("b")] == ["added"]
    late = {entry.text for entry in bench.ledger.history("a", since=1600.0)}
    assert late == {added.text, "lease 1598", "lease 1599"}
