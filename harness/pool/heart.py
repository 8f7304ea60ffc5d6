"""What keeps the leases of a process alive while it lives."""

import logging
import threading
from collections.abc import Mapping

from harness.errors import LedgerError
from harness.pool.ledger import Ledger

log = logging.getLogger(__name__)

_BEATS_PER_TTL = 6


class Heart:
    """Beats for all leases of a pool, in a thread that is there while there are any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._leases: dict[int, int] = {}
        self._until: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, token: int, count: int, until: float) -> None:
        """Beat for a lease of `count` devices, which is good until `until` (`CLOCK_BOOTTIME`)."""
        with self._changed:
            self._leases[token] = count
            self._until[token] = until
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="qnnfarm-heartbeat", daemon=True
                )
                self._thread.start()

    def rename(self, token: int, new: int) -> None:
        """A lease has a new token."""
        with self._changed:
            self._leases[new] = self._leases.pop(token)
            self._until[new] = self._until.pop(token)

    def drop(self, token: int) -> None:
        """Beat no more for a lease."""
        with self._changed:
            self._leases.pop(token, None)
            self._until.pop(token, None)
            if not self._leases:
                self._changed.notify()  # nothing to stay for

    @property
    def beating(self) -> bool:
        """Whether there is a lease to beat for."""
        return bool(self._leases)

    def until(self, token: int) -> float:
        """The `CLOCK_BOOTTIME` until which a lease is good; in the past when it is lost."""
        return self._until.get(token, 0.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._ledger.ttl_s / _BEATS_PER_TTL)
                if not self._leases:
                    self._thread = None
                    return
                leases = dict(self._leases)
            try:
                self._take(self._ledger.heartbeat(leases))
            except LedgerError as error:
                # The leases stay good for what is left of their time; then their holders are told.
                log.warning("%s", error)

    def _take(self, good: Mapping[int, float | None]) -> None:
        with self._changed:
            for token, until in good.items():
                if token not in self._leases:
                    continue
                self._until[token] = until or 0.0
                if until is None:
                    del self._leases[token]
