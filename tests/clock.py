"""Clock that tests turn by hand."""

from dataclasses import dataclass, field


@dataclass
class ManualClock:
    """Implements `harness.clock.Clock`; time passes by assignment and by `sleep` alone.

    Attributes:
        time: seconds since boot.
        set_by: seconds by which the wall clock was set.
        slept: every sleep, in seconds.
    """

    time: float = 1000.0
    set_by: float = 0.0
    slept: list[float] = field(default_factory=list)

    def boottime(self) -> float:
        return self.time

    def now(self) -> float:
        return 1_700_000_000.0 + self.time + self.set_by

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.time += seconds
