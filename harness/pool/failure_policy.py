"""Failure policy of a pool: which failures count against a device, and when they quarantine it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from harness.errors import FailureClass, HarnessError, one_line


@dataclass(frozen=True, slots=True)
class Work:
    """Work that a holder does on a device, such as a cell of a plan or a test.

    Attributes:
        id: digest of what it does: the same in all sessions, for all users and on all devices.
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

    @property
    def has_container(self) -> bool:
        """True if it runs a container, which may itself be broken."""
        return "/" in self.id


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
        work: what failed; failures of unnamed work are not compared.
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
        """Description of what failed, and how."""
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
class EarlierFailure:
    """An earlier failure of the same container, or work without one, of one kind, on any device.

    Attributes:
        id: of its record.
        key: of the device.
        name: of the device.
        at: seconds since 1970.
        lease: number of the device's lease.
        counts: 1 if it counts against the device by now, else 0.
    """

    id: int
    key: str
    name: str
    at: float
    lease: int
    counts: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on what a failure counts against: the device, its work, or neither.

    Attributes:
        excuse: why it does not count against the device; empty if it does.
        blame: why it counts against the work; empty if it does not.
        taken_back: records of earlier failures that no longer count against their devices.
    """

    excuse: str = ""
    blame: str = ""
    taken_back: Collection[int] = ()


def judge(
    report: FailureReport, key: str, earlier: Sequence[EarlierFailure], last_good: int
) -> Judgement:
    """Judge a failure on a device by the evidence of all devices.

    Args:
        earlier: failures of the same subject since the work that failed last ended well anywhere.
        last_good: number of the device's last lease that used it and ended without a failure.
    """
    work = report.work
    # Begun before it had failed elsewhere, it may have failed for a common reason, such as a hub.
    elsewhere = [f for f in earlier if f.key != key and work is not None and f.at <= work.began]
    if elsewhere:
        blame = f"it fails alike on {', '.join(dict.fromkeys(f.name for f in elsewhere))}"
        return Judgement(blame, blame, [failure.id for failure in earlier if failure.counts])
    if report.answered:
        return Judgement(report.answered)
    here = [f for f in earlier if f.key == key and f.counts]
    if any(f.lease < last_good for f in here):
        return Judgement("it failed there before, and the device has served others well since")
    if here and work is not None and work.has_container and not report.is_device:
        return Judgement("its container failed there before, which counts once")
    return Judgement()


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
    """Limits beyond which failures bring quarantine, and its length.

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
