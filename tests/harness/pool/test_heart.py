"""Heartbeats beside what else happens to a lease at the same moment."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.pool.book import Book
from harness.pool.clock import SystemClock
from harness.pool.database import Database
from harness.pool.evidence import QuarantineRule
from harness.pool.heart import Heart, Pulse
from harness.pool.leases import Leases
from harness.pool.ledger import Ledger
from harness.pool.rows import Facts
from tests.harness.pool.conftest import process


class SlowLeases(Leases):
    """A token is raised; whoever did it gets to know it a while later."""

    def raise_token(self, token: int, above: int, count: int) -> int | None:
        new = super().raise_token(token, above, count)
        time.sleep(0.5)
        return new


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "pool.db")
    yield made
    made.close()


def test_a_beat_between_raising_a_token_and_knowing_it_costs_no_lease(database: Database) -> None:
    clock, rule = SystemClock(), QuarantineRule()
    ledger = Ledger(database, clock, ttl_s=1.0, rule=rule, gone=lambda _: False)
    ledger.devices.register_found("a", "a", "spec:a", Facts())
    ticket = ledger.tickets.enqueue(process(1), ["a"], 1)
    rows = ledger.tickets.try_grant(ticket, process(1))
    assert rows
    heart = Heart(SlowLeases(Book(database, clock, 1.0, rule, lambda _: False)))
    pulse = Pulse(rows[0].token, 1, rows[0].beat + 1.0)
    heart.keep(pulse)
    assert heart.raise_token(pulse, 500)
    assert pulse.token == 501
    time.sleep(0.4)
    assert pulse.until > clock.boottime()
    assert ledger.leases.holds(501, "a")
    heart.drop(pulse)
    assert pulse.until < clock.boottime()
