"""Errors of pools and of plan runs."""

from harness.errors.base import FailureClass, HarnessError


class PoolError(HarnessError):
    """Root of a pool's errors, and the error of those without a class."""

    __match_args__ = ("reason",)
    failure_class = FailureClass.DEVICE
    template = "{reason}"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.__post_init__()


class UnknownMemberError(PoolError):
    """The pool has no device with this name."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        names = "it has {known}" if self.known else "it has none"
        return self._fill("the pool has no device {name!r:80}: " + names)


class RequirementError(PoolError):
    """No device of the pool can ever meet the requirement.

    Attributes:
        requirement: all of it, in words.
        reason: the part that no device meets, and the devices' values of it.
    """

    requirement: str
    reason: str
    template = "no device of the pool meets {requirement}: {reason}"


class LeaseTimeoutError(PoolError):
    """No lease was granted in time.

    Attributes:
        reason: why each device was not available.
    """

    requirement: str
    timeout_s: float
    reason: str
    template = "no lease of {requirement} within {timeout_s:g} s: {reason}"


class LeaseLostError(PoolError):
    """A lease ended while its holder still used it; another process may hold the device now."""

    failure_class = FailureClass.LEASE
    loses_device = True
    name: str
    token: int
    reason: str
    template = "the lease of {name:80} (token {token}) is lost: {reason}"


class DeviceHeldError(PoolError):
    """A holder of another ledger, of another user or host, has the device.

    Attributes:
        holder: as the device tells it.
        is_copy: whether its ledger has the id of this one.
    """

    device_state = "held"
    name: str
    holder: str
    is_copy: bool = False

    def __str__(self) -> str:
        copy = "a copy of this ledger, or this one before it went back to an earlier state"
        ledger = copy if self.is_copy else "another ledger"
        return self._fill("{name:80} is held by {holder}, through {ledger}", ledger=ledger)


class NotificationError(PoolError):
    """A receiver of notifications did not take one."""

    receiver: str
    reason: str
    template = "no notification to {receiver:200}: {reason}"


class LedgerError(PoolError):
    """The ledger of all leases cannot be used."""

    ends_plan = True
    path: str
    reason: str
    template = "the ledger of leases {path} cannot be used: {reason}"


# Run plans


class NightlyBusyError(HarnessError):
    """Another process works on a night of the same plan."""

    folder: str
    template = "another `qnnfarm nightly` works on the nights in {folder}: wait for it, or stop it"
