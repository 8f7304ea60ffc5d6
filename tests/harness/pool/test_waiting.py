"""Who waits keeps the place, however short the heartbeats are good for."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from harness.devices.spec import DeviceSpec
from harness.errors import LeaseTimeoutError
from harness.pool.acquire import Acquisition
from harness.pool.base import Requirement
from harness.pool.changes import Changes
from harness.pool.clock import SystemClock
from harness.pool.database import Database
from harness.pool.evidence import QuarantineRule
from harness.pool.heart import Heart
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.owner import this_process
from harness.pool.rows import Facts

if TYPE_CHECKING:
    from harness.pool.claims import Claims


def test_a_place_in_the_queue_outlasts_the_shortest_ttl(tmp_path: Path) -> None:
    databases = [Database(tmp_path / "pool.db") for _ in range(2)]
    waiting, other = (
        Ledger(db, SystemClock(), ttl_s=ttl_s, rule=QuarantineRule())
        for db, ttl_s in zip(databases, (1.0, 3600.0), strict=True)
    )
    other.devices.register_found("a", "a", "spec:a", Facts())
    assert other.tickets.try_grant(other.tickets.enqueue(this_process(), ["a"], 1), this_process())
    given_up = threading.Event()

    def wait() -> None:
        claims = cast("Claims", None)  # nothing is granted
        request = Acquisition(waiting, SystemClock(), Heart(waiting.leases), claims, this_process())
        with pytest.raises(LeaseTimeoutError):
            request.run(
                Requirement(),
                lambda: {"a": Member("a", DeviceSpec("android", "a"))},
                timeout_s=None,
                purpose="",
                changes=Changes(),
                while_waiting=lambda: None,
                cancelled=given_up.is_set,
            )

    def tickets() -> list[int]:
        other.reconcile()
        with databases[1].reading() as db:
            return [row["id"] for row in db.execute("SELECT id FROM tickets WHERE token IS NULL")]

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        while not (first := tickets()):
            time.sleep(0.01)
        seen = set()
        end = time.monotonic() + 4
        while time.monotonic() < end:
            seen.update(tickets())
            time.sleep(0.01)
    finally:
        given_up.set()
        thread.join()
        for database in databases:
            database.close()
    assert seen == set(first)
