"""Failure policy of a pool: which failures count against a device, and when they quarantine it."""

from dataclasses import dataclass
from typing import Self

from harness.errors import FailureClass, HarnessError, one_line


@dataclass(frozen=True, slots=True)
class Work:
    """Work that a holder does on a device, such as a cell of a plan or a test.

    Attributes:
        id: digest of its content: the same in all sessions, for all users and on all devices.
            Work with a container is `CONTAINER/DIGEST`, see `work_id`.
        label: for people.
        began: seconds since 1970 at which it began on the device.
    """

    id: str
    label: str
    began: float

    @property
    def subject(self) -> str:
        """Container, or else the work itself, that failures count against beside the device."""
        return self.id.partition("/")[0]


def work_id(container_sha256: str, digest: str) -> str:
    """Return the id of work with a container, or without one if that is empty."""
    return f"{container_sha256}/{digest}" if container_sha256 else digest


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Report of a lease's holder of a failure on its device.

    Attributes:
        kind: name of the error's class.
        weight: how much it counts against the device; 0 says nothing about it.
        recover: whether the device must be reached again before its next use.
        work: the work that failed; failures of unnamed work are not compared.
        answered: how the device answered a probe right after a time limit; empty if it did not.
        is_device: whether no work can cause it, such as a lost connection or a corrupt file.
    """

    kind: str
    weight: float
    recover: bool
    text: str
    work: Work | None = None
    answered: str = ""
    is_device: bool = False

    @property
    def description(self) -> str:
        """The work, and its failure."""
        if self.work is None or self.work.label in self.text:
            return self.text
        return f"{self.work.label}: {self.text}"

    @classmethod
    def of(
        cls,
        failure: HarnessError,
        *,
        recover: bool = False,
        least_weight: float = 0.0,
        work: Work | None = None,
        answered: str = "",
    ) -> Self:
        """Make a report of an error, which counts for at least `least_weight`.

        A device that answered a probe needs no recovery.
        """
        recover = recover or (failure.needs_recovery and not answered)
        return cls(
            type(failure).__name__,
            max(failure.quarantine_weight, least_weight),
            recover,
            one_line(str(failure)),
            work,
            answered,
            is_device=recover or failure.failure_class is FailureClass.DEVICE,
        )


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure of a device since its last good lease.

    Attributes:
        lease: number of the device's lease.
        subject: the work that failed, if no other device is known to have run it; else empty.
    """

    lease: int
    weight: float
    kind: str
    text: str
    subject: str = ""


def backoff(first_s: float, most_s: float, failures: int) -> float:
    """Return the seconds to wait after that many failures: doubled each time, up to a bound."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)
