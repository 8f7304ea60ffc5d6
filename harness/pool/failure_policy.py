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
    """When failures bring quarantine, and how long it lasts.

    Attributes:
        limit: sum of weights that brings quarantine.
        window: number of the last leases that count, each with its heaviest failure.
        backoff_s: time until the probation run; doubled by each that fails and each return.
    """

    limit: float = 3.0
    window: int = 10
    backoff_s: float = 60.0
    max_backoff_s: float = 3600.0

    @property
    def memory(self) -> int:
        """Number of the last leases whose failures are kept."""
        return 10 * self.window

    def counted(self, failures: Iterable[FailureRecord], leases: int) -> Sequence[FailureRecord]:
        """Return the heaviest failure of each lease in the window, the newest lease last.

        Args:
            leases: number of leases of the device so far.
        """
        worst: dict[int, FailureRecord] = {}
        for failure in failures:
            other = worst.get(failure.lease)
            if failure.lease > leases - self.window and (
                other is None or failure.weight > other.weight
            ):
                worst[failure.lease] = failure
        return [worst[lease] for lease in sorted(worst)]

    def backoff(self, times: int) -> float:
        """Return the seconds until a probation run after so many failed ones and returns."""
        return backoff(self.backoff_s, self.max_backoff_s, times)


def backoff(first_s: float, most_s: float, failures: int) -> float:
    """Return the seconds to wait after that many failures: doubled each time, up to a bound."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)
