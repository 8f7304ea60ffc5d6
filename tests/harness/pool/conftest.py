"""Ledger with a manual clock and processes that a test declares dead."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from harness.pool.config import PoolConfig
from harness.pool.context import Changes, PoolContext
from harness.pool.database import Database
from harness.pool.failure_policy import QuarantineRule
from harness.pool.heartbeat import Heartbeat
from harness.pool.ledger import Ledger
from harness.pool.owner import Owner, host_id
from harness.pool.pool import Pool
from harness.pool.records import Facts
from tests.clock import ManualClock

if TYPE_CHECKING:
    from harness.pool.fence import FenceClaims
    from harness.pool.opener import Opener

TTL_S = 30.0


@dataclass
class Bench:
    """A ledger with its clock, its dead processes and its rule."""

    path: Path
    clock: ManualClock = field(default_factory=ManualClock)
    dead: set[int] = field(default_factory=set)
    rule: QuarantineRule = field(default_factory=QuarantineRule)

    def __post_init__(self) -> None:
        self.database = Database(self.path)
        self.ledger = Ledger(
            self.database,
            self.clock,
            ttl_s=TTL_S,
            rule=self.rule,
            ended=lambda owner: owner.pid in self.dead,
        )

    def add(self, *names: str) -> None:
        for name in names:
            self.ledger.devices.record_found(
                name, name, f"spec:{name}", Facts("SM8750", "v79", 1 << 30)
            )

    def context(
        self,
        *,
        claims: object = None,
        opener: object = None,
        changes: Changes | None = None,
        config: PoolConfig | None = None,
    ) -> PoolContext:
        """Return the context of a pool on this ledger; without `claims`, nothing can be claimed."""
        return PoolContext(
            config or PoolConfig(),
            self.clock,
            self.ledger,
            cast("Opener", opener),
            Heartbeat(self.ledger.leases),
            cast("FenceClaims", claims),
            changes or Changes(),
        )

    def state(self, key: str) -> str:
        return str(self.ledger.devices.rows([key])[key].state)

    def reason(self, key: str) -> str:
        return self.ledger.devices.rows([key])[key].reason


def process(pid: int) -> Owner:
    return Owner(host_id(), "boot", pid, 1, "ns", f"process {pid}")


def close(pool: Pool) -> None:
    """Close it, and wait for its upkeep, which could start an adb server or device of later tests.

    A closed pool's upkeep ends after the step that it is at.
    """
    pool.close()
    for thread in threading.enumerate():
        if thread.name.startswith("qnnfarm-upkeep-"):
            thread.join()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "pool.db")
    yield made
    made.database.close()


@pytest.fixture
def grab(bench: Bench) -> Callable[..., int]:
    """Leases devices for a process; returns the token."""

    def take(pid: int, *keys: str) -> int:
        ticket = bench.ledger.tickets.enqueue(process(pid), keys, len(keys))
        rows = bench.ledger.tickets.try_grant(ticket, process(pid))
        assert rows is not None
        bench.ledger.tickets.settle(ticket)
        return rows[0].token

    return take
