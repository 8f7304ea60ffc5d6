"""Objects that exist once per open pool, with the heartbeat that renews its leases."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from harness.clock import Clock
from harness.errors import LedgerError
from harness.pool.config import PoolConfig
from harness.pool.ledger import Ledger
from harness.pool.opener import Opener
from harness.pool.records import LeaseRow

log = logging.getLogger(__name__)

_BEATS_PER_TTL = 6


class Heartbeat:
    """Renews all leases of a pool, in a thread that runs while there are any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._terms: dict[str, tuple[int, float]] = {}
        """By grant: the number of devices of a lease, and until when it is valid."""
        self._thread: threading.Thread | None = None

    def start(self, rows: Sequence[LeaseRow]) -> None:
        """Renew a lease until `stop`; its devices were granted now."""
        with self._changed:
            self._terms[rows[0].grant] = len(rows), rows[0].until
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="qnnfarm-heartbeat", daemon=True
                )
                self._thread.start()

    def stop(self, grant: str) -> None:
        """Renew a lease no longer; it is no longer valid for this process."""
        with self._changed:
            self._terms.pop(grant, None)
            if not self._terms:
                self._changed.notify()  # so that the thread ends

    def until(self, grant: str) -> float:
        """Return the `CLOCK_BOOTTIME` until which a lease is valid; 0 once it is lost or ended."""
        return self._terms.get(grant, (0, 0.0))[1]

    @property
    def active(self) -> bool:
        """True if there is a lease to renew."""
        return bool(self._terms)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._ledger.ttl_s / _BEATS_PER_TTL)
                if not self._terms:
                    self._thread = None
                    return
                counts = {grant: count for grant, (count, _) in self._terms.items()}
            try:
                renewed = self._ledger.renew(counts)
            except LedgerError as error:
                # The leases stay valid for the rest of their time; then their holders learn of it.
                log.warning("%s", error)
                continue
            with self._changed:
                for grant in renewed.keys() & self._terms.keys():
                    if until := renewed[grant]:
                        self._terms[grant] = counts[grant], until
                    else:
                        del self._terms[grant]


@dataclass(frozen=True, slots=True)
class PoolContext:
    """Objects of one open pool, for all that is done in it."""

    config: PoolConfig
    clock: Clock
    ledger: Ledger
    opener: Opener
    heartbeat: Heartbeat
