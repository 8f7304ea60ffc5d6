"""Errors of pools and of plan runs."""

from harness.errors.base import FailureClass, HarnessError


class PoolError(HarnessError):
    """Root of what a pool raises."""

    failure_class = FailureClass.DEVICE


class PoolConfigError(PoolError):
    """A pool configuration that cannot be used.

    Attributes:
        line: of the file, counted from 1; `None` where there is none.
        key: e.g. `devices[2].tags`; empty for the whole file.
    """

    path: str
    line: int | None
    key: str
    reason: str

    def __str__(self) -> str:
        line = "" if self.line is None else ", line {line}"
        key = ", {key:120}" if self.key else ""
        return self._fill("{path}" + line + key + ": {reason}")


class UnknownMemberError(PoolError):
    """The pool has no device with this name."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        known = "it has {known}" if self.known else "it has none"
        return self._fill("the pool has no device {name!r:80}: " + known)


class MemberStateError(PoolError):
    """A request that is not possible in the state of the device."""

    name: str
    state: str
    reason: str
    template = "{name:80} is {state}: {reason}"


class RequirementError(PoolError):
    """No device of the pool can ever meet the requirement.

    Attributes:
        requirement: all of it, in words.
        reason: the part that no device meets, and what there is instead.
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
    """

    device_state = "held"
    name: str
    holder: str
    template = "{name:80} is held by {holder}, through another ledger"


class RecoveryStepError(PoolError):
    """A step of a device's recovery was skipped, or had no effect."""

    reason: str
    template = "{reason}"


class NotificationError(PoolError):
    """A receiver of notifications did not take one."""

    receiver: str
    reason: str
    template = "no notification to {receiver:200}: {reason}"


class HubError(PoolError):
    """A USB hub cannot be switched, or must not be."""

    reason: str
    template = "{reason}"


class LedgerError(PoolError):
    """The ledger of all leases cannot be used."""

    ends_plan = True
    path: str
    reason: str
    template = "the ledger of leases {path} cannot be used: {reason}"


class DamagedLedgerError(LedgerError):
    """The file is no ledger, or a damaged one."""

    template = f"{LedgerError.template}; while nothing is leased it may be moved away"


class NewerLedgerError(LedgerError):
    """The ledger was written by a newer qnnfarm."""

    __match_args__ = ("path", "version")

    def __init__(self, path: str, version: int) -> None:
        self.version = version
        super().__init__(path, f"a newer qnnfarm wrote it (format {version})")


# Run plans


class PlanError(HarnessError):
    """Root of what is wrong with a plan or its run; a cell fails with its device's error."""


class PlanFileError(PlanError):
    """A plan file that cannot be used.

    Attributes:
        key: e.g. `workloads[1].prompt_tokens`; empty for the whole file.
        line: of the file, counted from 1; `None` where there is none.
    """

    path: str
    key: str
    reason: str
    line: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else ", line {line}"
        key = ", {key:120}" if self.key else ""
        return self._fill("{path}" + line + key + ": {reason}")


class PlanBusyError(PlanError):
    """Another process runs the same plan into the same results database."""

    journal: str
    template = (
        "another `qnnfarm run` works on this plan and database: wait for it, or stop it "
        "(its journal is {journal})"
    )


class NightlyBusyError(PlanError):
    """Another process works on a night of the same plan."""

    folder: str
    template = "another `qnnfarm nightly` works on the nights in {folder}: wait for it, or stop it"


class NightlyFolderError(PlanError):
    """The folder of a plan's nights, or a file in it, cannot be used."""

    path: str
    reason: str
    template = "cannot use the nights' {path}: {reason}"


class JournalError(PlanError):
    """The journal of a plan cannot be read or written."""

    ends_plan = True
    path: str
    reason: str
    template = "cannot use the journal {path}: {reason}"


class NoDeviceForCellError(PlanError):
    """A cell got no device within the plan's `timeouts.lease_s`.

    Attributes:
        requirement: that the device must meet.
        waited_s: time that the cell waited.
    """

    failure_class = FailureClass.DEVICE
    requirement: str
    waited_s: float
    template = (
        "no device was free for {requirement} within {waited_s:g} s: see `qnnfarm pool` for who "
        "holds them, and what is wrong with them"
    )
