"""Ctrl-C at any line of the pool's own code leaves neither locks nor leases behind."""

import itertools
import os
import random
import sqlite3
from pathlib import Path

import pytest

import harness.pool
import harness.pool.context
import harness.pool.database
import harness.pool.lease
import harness.pool.pool
from harness.devices.base import CommandResult
from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.devices.spec import DeviceSpec
from harness.errors import DeviceLostError, LedgerError
from harness.pool.context import PoolContext
from harness.pool.fence import Fence
from harness.pool.lease import Lease
from harness.pool.members import Member
from harness.pool.pool import Acquisition
from harness.pool.records import LeaseRow
from harness.pool.requirement import Requirement
from tests.harness.pool.conftest import TTL_S, Bench, process
from tests.harness.pool.interrupts import Interrupter

pytestmark = pytest.mark.first
_OUTSIDE = (
    harness.pool.pool,
    harness.pool.database,
    harness.pool.context,
    harness.pool.lease,
)
"""Code that does not run within a transaction: an end in the middle of one undoes it, whole."""
_STEP = 1 if os.environ.get("CI") else 17
"""Elsewhere each run takes another ninth of the hundreds of lines of a request."""


class HandDevice(Device):
    """A device on which nothing happens."""

    def __init__(self) -> None:
        super().__init__(LocalTransport())

    def shell(self, *_: object, **__: object) -> CommandResult:
        return CommandResult(0, "", "")


class HandClaim:
    """Fences nothing, in place of `claim`; a device may have a higher token there."""

    higher = 0

    def __call__(self, context: PoolContext, lease: LeaseRow, *_: object, **__: object) -> Fence:
        key, token = lease.key, lease.token
        if token <= self.higher:
            passed = context.ledger.pass_token(key, lease.grant, self.higher, "it says so")
            assert passed
            token = passed
        return Fence(key, key, HandDevice(), token, root="/root", id="id")


@pytest.fixture(autouse=True)
def claims(monkeypatch: pytest.MonkeyPatch) -> HandClaim:
    claims = HandClaim()
    monkeypatch.setattr(harness.pool.pool, "claim", claims)
    return claims


def acquire(context: PoolContext, keys: str = "a") -> Lease:
    members = {key: Member(key, DeviceSpec("android", key)) for key in keys}
    requirement = Requirement(count=len(keys))
    return Acquisition(context, process(1), requirement, lambda: members).run(
        timeout_s=10, while_waiting=lambda: None, cancelled=lambda: False
    )


def test_a_transaction_interrupted_at_any_line_leaves_no_lock(bench: Bench) -> None:
    bench.add("a")
    for number in itertools.count(1):
        interrupter = Interrupter(number, harness.pool)
        if not interrupter.run(lambda: bench.ledger.add_history("a", "what", "text")):
            break
        with sqlite3.connect(bench.path, timeout=0, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")  # fails if the interrupted one still holds the lock
            other.execute("ROLLBACK")
        other.close()
        assert bench.ledger.rows(["a"]), interrupter.where
    assert number > 5


def test_a_request_interrupted_at_any_line_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: HandClaim
) -> None:
    monkeypatch.setattr(harness.pool.pool, "_AFTER_FAILURE_S", 0.0)
    bench = Bench(tmp_path / "pool.db")
    bench.add("a")
    context = bench.context()
    for number in itertools.count(random.randint(1, _STEP), _STEP):  # noqa: S311
        granted: list[Lease] = []
        interrupter = Interrupter(number, *_OUTSIDE)
        claims.higher = bench.ledger.rows(["a"])["a"].leases * 10
        if not interrupter.run(lambda: granted.append(acquire(context))):  # noqa: B023
            break
        assert not context.heartbeat.active, interrupter.where
        bench.clock.time += TTL_S  # what was cut off before anybody knew of it
        bench.ledger.reconcile()
        assert bench.state("a") == "ready", interrupter.where
        assert bench.ledger.waiting() == [], interrupter.where
    assert number > 50
    granted[0].release()
    assert not context.heartbeat.active
    bench.database.close()


def test_a_lease_whose_report_fails_is_given_back(bench: Bench) -> None:
    bench.add("a")
    context = bench.context()
    lease = acquire(context)
    bench.sql("ALTER TABLE pool_evidence RENAME TO elsewhere")
    lost = DeviceLostError("serial", "a push", "closed")
    with pytest.raises(LedgerError), lease:
        raise lost
    assert not context.heartbeat.active


def test_a_grant_whose_ticket_cannot_be_settled_is_given_back(bench: Bench) -> None:
    bench.add("a")
    context = bench.context()
    bench.sql(
        "CREATE TRIGGER full BEFORE DELETE ON pool_tickets BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(LedgerError):
        acquire(context)
    assert not context.heartbeat.active
    assert bench.state("a") == "ready"


def test_a_grant_whose_report_fails_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add("a")

    def fail(*_: object, **__: object) -> Fence:
        raise DeviceLostError("serial", "a claim", "closed")

    monkeypatch.setattr(harness.pool.pool, "claim", fail)
    context = bench.context()
    bench.sql("ALTER TABLE pool_evidence RENAME TO elsewhere")
    with pytest.raises(LedgerError):
        acquire(context)
    assert not context.heartbeat.active
