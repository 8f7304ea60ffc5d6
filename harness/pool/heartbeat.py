"""What keeps the leases of a process alive while it lives."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import LedgerError
from harness.pool.ledger import Leases

log = logging.getLogger(__name__)

_BEATS_PER_TTL = 6


@dataclass(slots=True, eq=False)
class Pulse:
    """A lease as its heart knows it, which alone changes this.

    Attributes:
        token: of the lease now.
        count: of its devices.
        until: the `CLOCK_BOOTTIME` until which it is good; in the past when it is lost.
    """

    token: int
    count: int
    until: float


class Heart:
    """Beats for all leases of a pool, in a thread that is there while there are any."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._changed = threading.Condition()
        self._pulses: set[Pulse] = set()
        self._thread: threading.Thread | None = None

    def keep(self, pulse: Pulse) -> None:
        """Beat for a lease until it is dropped."""
        with self._changed:
            self._pulses.add(pulse)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="qnnfarm-heartbeat", daemon=True
                )
                self._thread.start()

    def raise_token(self, pulse: Pulse, above: int) -> bool:
        """A higher token for a lease; whether it still holds. See `Leases.raise_token`."""
        # A beat for the old token in between would say that the lease is lost.
        with self._changed:
            new = self._leases.raise_token(pulse.token, above, pulse.count)
            if new is not None:
                pulse.token = new
            return new is not None

    def drop(self, pulse: Pulse) -> None:
        """Beat no more for a lease."""
        with self._changed:
            self._pulses.discard(pulse)
            pulse.until = 0.0
            if not self._pulses:
                self._changed.notify()  # nothing to stay for

    @property
    def beating(self) -> bool:
        """Whether there is a lease to beat for."""
        return bool(self._pulses)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._leases.ttl_s / _BEATS_PER_TTL)
                if not self._pulses:
                    self._thread = None
                    return
                counts = {pulse.token: pulse.count for pulse in self._pulses}
            try:
                self._take(self._leases.heartbeat(counts))
            except LedgerError as error:
                # The leases stay good for what is left of their time; then their holders are told.
                log.warning("%s", error)

    def _take(self, good: Mapping[int, float | None]) -> None:
        with self._changed:
            for pulse in list(self._pulses):
                if pulse.token not in good:
                    continue
                pulse.until = good[pulse.token] or 0.0
                if not pulse.until:
                    self._pulses.discard(pulse)
