"""Failure policy of a pool: which failures quarantine a device, and for how long."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from harness.errors import HarnessError, one_line


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What the holder of a lease reports of a failure on its device.

    Attributes:
        kind: name of the error's class.
        weight: how much it counts against the device; 0 says nothing about it.
        recover: whether the device must be reached again before its next use.
    """

    kind: str
    weight: float
    recover: bool
    text: str

    @classmethod
    def of(cls, failure: HarnessError, *, recover: bool = False, least_weight: float = 0.0) -> Self:
        """Make a report of an error, which counts for at least `least_weight`."""
        return cls(
            type(failure).__name__,
            max(failure.quarantine_weight, least_weight),
            recover or failure.needs_recovery,
            one_line(str(failure)),
        )


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure that was reported and is not settled yet.

    Attributes:
        lease: number of the device's lease.
    """

    lease: int
    weight: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """When evidence is enough, and for how long a device is out then.

    Attributes:
        limit: sum of weights from which on a device is quarantined.
        window: of how many of its last leases; of one lease only the heaviest failure counts.
        backoff_s: until its probation run; doubled by each that fails and each return.
    """

    limit: float = 3.0
    window: int = 10
    backoff_s: float = 60.0
    max_backoff_s: float = 3600.0

    @property
    def memory(self) -> int:
        """For how many of its leases a device's evidence is kept, settled or not."""
        return 10 * self.window

    def counted(self, evidence: Iterable[FailureRecord], leases: int) -> Sequence[FailureRecord]:
        """What counts: the heaviest failure of each lease in the window, the newest lease last.

        Args:
            leases: how many the device has had.
        """
        worst: dict[int, FailureRecord] = {}
        for found in evidence:
            known = worst.get(found.lease)
            if found.lease > leases - self.window and (
                known is None or found.weight > known.weight
            ):
                worst[found.lease] = found
        return [worst[lease] for lease in sorted(worst)]

    def backoff(self, times: int) -> float:
        """Seconds to wait for a probation run after so many that failed, and returns."""
        return backoff(self.backoff_s, self.max_backoff_s, times)


def backoff(first_s: float, most_s: float, failures: int) -> float:
    """Seconds to wait after that many failures: doubled each time, up to a bound."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)
