"""Heartbeat thread that renews the leases of this process."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from harness.errors import LedgerError
from harness.pool.ledger import Ledger
from harness.pool.records import LeaseRow

log = logging.getLogger(__name__)

_BEATS_PER_TTL = 6


@dataclass(slots=True, eq=False)
class LeaseTerm:
    """The validity of a lease; only the heartbeat changes it.

    Attributes:
        token: of the lease.
        count: number of its devices.
        until: the `CLOCK_BOOTTIME` until which it is valid; in the past once it is lost.
    """

    token: int
    count: int
    until: float

    @classmethod
    def of(cls, rows: Sequence[LeaseRow]) -> Self:
        """Return the term of a lease whose devices were granted now."""
        return cls(rows[0].token, len(rows), rows[0].until)


class Heartbeat:
    """Renews all leases of a pool, in a thread that runs while there are any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._terms: set[LeaseTerm] = set()
        self._thread: threading.Thread | None = None

    def start(self, term: LeaseTerm) -> None:
        """Renew a lease until `stop`."""
        with self._changed:
            self._terms.add(term)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="qnnfarm-heartbeat", daemon=True
                )
                self._thread.start()

    def stop(self, term: LeaseTerm) -> None:
        """Renew a lease no longer; it is no longer valid for this process."""
        with self._changed:
            self._terms.discard(term)
            term.until = 0.0
            if not self._terms:
                self._changed.notify()  # so that the thread ends

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
                counts = {term.token: term.count for term in self._terms}
            try:
                renewed = self._ledger.renew(counts)
            except LedgerError as error:
                # The leases stay valid for the rest of their time; then their holders learn of it.
                log.warning("%s", error)
                continue
            with self._changed:
                for term in list(self._terms):
                    if term.token not in renewed:
                        continue
                    term.until = renewed[term.token] or 0.0
                    if not term.until:
                        self._terms.discard(term)
