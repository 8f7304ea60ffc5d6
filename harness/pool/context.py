"""Objects that exist once per open pool."""

from dataclasses import dataclass

from harness.clock import Clock
from harness.pool.config import PoolConfig
from harness.pool.heartbeat import Heartbeat
from harness.pool.ledger import Ledger
from harness.pool.opener import Opener


@dataclass(frozen=True, slots=True)
class PoolContext:
    """Objects of one open pool, for all that is done in it."""

    config: PoolConfig
    clock: Clock
    ledger: Ledger
    opener: Opener
    heartbeat: Heartbeat
