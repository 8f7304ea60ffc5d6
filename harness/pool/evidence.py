"""What a failure says about the device that it happened on."""

from collections.abc import Iterable
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
class QuarantineRule:
    """When evidence is enough.

    Attributes:
        limit: sum of weights from which on a device is quarantined.
        window: of how many of its last leases; of one lease only the heaviest failure counts.
    """

    limit: float = 3.0
    window: int = 10

    def exceeded(self, evidence: Iterable[tuple[int, float]], leases: int) -> float | None:
        """The sum over the window if it is over the limit.

        Args:
            evidence: number of the lease and weight, of what is not settled yet.
            leases: how many leases the device has had.
        """
        worst: dict[int, float] = {}
        for lease, weight in evidence:
            if lease > leases - self.window:
                worst[lease] = max(weight, worst.get(lease, 0.0))
        total = sum(worst.values())
        return total if total >= self.limit else None
