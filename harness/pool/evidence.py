"""What a failure says about the device that it happened on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.errors import (
    AdbServerError,
    DeploymentCorruptError,
    DeviceConnectError,
    DeviceLostError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
    HarnessError,
    HostError,
    NoDeviceError,
    RunnerError,
    RuntimeOutputError,
    one_line,
)

_WEIGHTS: tuple[tuple[type[HarnessError], float], ...] = (
    (DeploymentCorruptError, 2.0),
    (DeviceLostError, 1.0),
    (DeviceTimeoutError, 1.0),
    (DeviceConnectError, 1.0),
    (RunnerError, 1.0),
    (RuntimeOutputError, 1.0),
)
"""What counts against a device. Nothing else does: neither wrong use, nor a container that cannot
run, nor a full disk, nor the death of the adb server or of a host on the way."""

_TO_RECOVER: tuple[type[HarnessError], ...] = (
    DeviceLostError,
    DeviceTimeoutError,
    DeviceConnectError,
    DeviceUnauthorizedError,
    NoDeviceError,
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a failure means.

    Attributes:
        weight: how much it counts against the device; 0 says nothing about it.
        recover: whether the device has to be reached anew before it is used again.
    """

    kind: str
    weight: float
    recover: bool
    text: str


def judge(failure: HarnessError) -> Judgement:
    """What `failure` says about its device."""
    weight = next((w for kind, w in _WEIGHTS if isinstance(failure, kind)), 0.0)
    recover = isinstance(failure, _TO_RECOVER) or on_the_way(failure)
    return Judgement(type(failure).__name__, weight, recover, one_line(str(failure)))


def on_the_way(failure: HarnessError) -> bool:
    """Whether the adb server or a host failed, and so all devices behind it at once."""
    return isinstance(failure, AdbServerError | HostError)


@dataclass(frozen=True, slots=True)
class Evidence:
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

    def counted(self, evidence: Iterable[Evidence], leases: int) -> Sequence[Evidence]:
        """What counts: the heaviest failure of each lease in the window, the newest lease last.

        Args:
            leases: how many the device has had.
        """
        worst: dict[int, Evidence] = {}
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
