"""The two clocks of a pool, which tests may turn by hand."""

import time
from datetime import UTC, datetime
from typing import Protocol

_DAY_S = 86_400.0


class Clock(Protocol):
    """What the time is."""

    def boottime(self) -> float:
        """Seconds since the host booted, sleep included: what leases are measured by."""
        ...

    def now(self) -> float:
        """Seconds since 1970, for people."""
        ...


class SystemClock:
    """The clocks of this host."""

    def boottime(self) -> float:
        """`CLOCK_BOOTTIME`: it goes on while the host is suspended and is never set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def now(self) -> float:
        """The wall clock."""
        return time.time()


def on_the_wall(moment: float, now: float) -> str:
    """A time for people, by the clock on the wall here: `22:04:13`, or with its day if long ago."""
    told = datetime.fromtimestamp(moment, UTC).astimezone()
    return f"{told:%H:%M:%S}" if abs(now - moment) < _DAY_S else f"{told:%d %b %H:%M}"
