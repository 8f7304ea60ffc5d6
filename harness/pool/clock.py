"""The two clocks of a pool, which tests may turn by hand."""

import time
from typing import Protocol


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
