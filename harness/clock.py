"""Clocks and deadlines, used by every package of the harness."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol, Self

from harness.errors import DeviceTimeoutError

_DAY_S = 86_400.0


class Clock(Protocol):
    """Source of time; tests turn theirs by hand."""

    def boottime(self) -> float:
        """Return the seconds since the host booted, including suspend; for durations and leases."""
        ...

    def now(self) -> float:
        """Return the wall-clock time in seconds since 1970; for people."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        ...


class SystemClock:
    """The clocks of this host."""

    def boottime(self) -> float:
        """Return `CLOCK_BOOTTIME`, which runs during suspend and is never set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def now(self) -> float:
        """Return the wall-clock time."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


def format_time(moment: float, now: float) -> str:
    """Format a wall-clock time in local time: `22:04:13`, with the date if over a day away."""
    local = datetime.fromtimestamp(moment, UTC).astimezone()
    return f"{local:%H:%M:%S}" if abs(now - moment) < _DAY_S else f"{local:%d %b %H:%M}"


class DeadlineExceeded(Exception):  # noqa: N818 - a signal, turned into a typed error by the caller
    """The deadline has passed."""


class Deadline:
    """Point in time by which an operation and all its steps must be done.

    Args:
        timeout_s: seconds from now.
        expired: makes the error that `remaining` raises after the deadline.
    """

    __slots__ = ("_expired", "_started", "_timeout_s")

    def __init__(
        self, timeout_s: float, expired: Callable[[], Exception] = DeadlineExceeded
    ) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._started = time.monotonic()

    @classmethod
    def for_device(cls, serial: str, action: str, timeout_s: float) -> Self:
        """Return a deadline that raises `DeviceTimeoutError` once it has passed."""
        return cls(timeout_s, lambda: DeviceTimeoutError(serial, action, timeout_s))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the deadline was set."""
        return time.monotonic() - self._started

    def shorten(self, timeout_s: float) -> None:
        """Let at most `timeout_s` more seconds pass."""
        self._timeout_s = min(self._timeout_s, self.elapsed_s + timeout_s)

    def at_most(self, seconds: float) -> float:
        """Return `seconds`, or the seconds left if there are fewer; see `remaining`."""
        return min(seconds, self.remaining())

    def remaining(self) -> float:
        """Return the seconds left, always more than 0.

        Raises:
            DeadlineExceeded: none are left; or the error of `expired`.
        """
        seconds = self._timeout_s - self.elapsed_s
        if seconds <= 0:
            raise self._expired()
        return seconds
