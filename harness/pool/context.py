"""State shared by the parts of one open pool."""

import threading
from dataclasses import dataclass, field

from harness.clock import Clock
from harness.pool.config import PoolConfig
from harness.pool.fence import FenceClaims
from harness.pool.heartbeat import Heartbeat
from harness.pool.ledger import Ledger
from harness.pool.opener import Opener


class Changes:
    """Counter of events after which a device may be free; threads of this process wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of changes so far."""
        return self._count

    def notify(self) -> None:
        """Count one more change and wake the waiting threads."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_beyond(self, count: int, timeout_s: float) -> bool:
        """Wait until there are more than `count` changes; return whether there are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count > count, timeout_s)


@dataclass(frozen=True, slots=True)
class PoolContext:
    """Objects that exist once per open pool."""

    config: PoolConfig
    clock: Clock
    ledger: Ledger
    opener: Opener
    heartbeat: Heartbeat
    claims: FenceClaims
    changes: Changes = field(default_factory=Changes)
