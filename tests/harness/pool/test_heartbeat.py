"""Renewal of a lease while its token is raised."""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.pool.database import Database
from harness.pool.failure_policy import QuarantineRule
from harness.pool.heartbeat import Heartbeat, LeaseTerm
from harness.pool.ledger import Leases, Ledger
from harness.pool.records import Facts
from harness.pool.transaction import LedgerContext
from tests.clock import ManualClock
from tests.harness.pool.conftest import process

_TTL_S = 0.06
"""By a clock that stands still: the heartbeat beats often, and no lease runs out meanwhile."""


class SlowLeases(Leases):
    """`raise_token` returns only after a renewal had every chance to come in between."""

    def __init__(self, context: LedgerContext) -> None:
        super().__init__(context)
        self._beaten = threading.Event()

    def renew(self, leases: Mapping[int, int]) -> dict[int, float | None]:
        good = super().renew(leases)
        self._beaten.set()
        return good

    def raise_token(self, token: int, above: int, count: int) -> int | None:
        new = super().raise_token(token, above, count)
        self._beaten.clear()
        self._beaten.wait(0.5)
        return new


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "pool.db")
    yield made
    made.close()


def test_a_renewal_while_a_token_is_raised_loses_no_lease(database: Database) -> None:
    clock, rule = ManualClock(), QuarantineRule()
    ledger = Ledger(database, clock, ttl_s=_TTL_S, rule=rule, ended=lambda _: False)
    ledger.devices.record_found("a", "a", "spec:a", Facts())
    ticket = ledger.tickets.enqueue(process(1), ["a"], 1)
    rows = ledger.tickets.try_grant(ticket, process(1))
    assert rows
    heartbeat = Heartbeat(SlowLeases(LedgerContext(database, clock, _TTL_S, rule, lambda _: False)))
    term = LeaseTerm(rows[0].token, 1, rows[0].beat + _TTL_S)
    heartbeat.start(term)
    beating = heartbeat._thread
    assert beating is not None
    assert heartbeat.raise_token(term, 500)
    assert term.token == 501
    clock.time += _TTL_S / 2
    while clock.boottime() < term.until < clock.boottime() + _TTL_S:  # until it has beaten again
        time.sleep(0.01)
    assert term.until == clock.boottime() + _TTL_S
    assert ledger.leases.holds(501, "a")
    heartbeat.stop(term)
    assert term.until < clock.boottime()
    beating.join()
