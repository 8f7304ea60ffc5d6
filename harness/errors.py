"""Errors of `harness`: one root, each with its data.

    HarnessError
      WrongUseError            an option or argument that cannot be used
      HostFileError            a file of this host that cannot be read or written
      RuntimeChoiceError       no runtime fits the container and the device
      GenieMissingError        this machine lacks Genie's libraries
      LibrariesFetchError
      PromptTooLongError
      ConfigFileError          a plan, a pool or a recipe that cannot be used
      PipelineError            a pipeline cannot do that
      AdbServerError
      NoDeviceError
      SeveralDevicesError
      HostError                root of failures of a host over SSH
        HostUnreachableError
        HostAuthError          it accepts none of the keys
      DeviceError              root of failures on one device
        DeviceConnectError
        DeviceUnauthorizedError
        DeviceLostError        it went away in the middle
        DeviceNotReadyError    offline, in recovery, or the like
        DeviceTimeoutError
        DeviceCommandError     a command on it failed
        DeviceTransferError    it refused a file
        DeviceFullError
        DeviceUnsupportedError    devices of its type cannot do this
        DeploymentCorruptError
        ConditionsNotMetError  too hot, or with the wrong charge, for a measured run
        RunnerError            the runner on the device failed
        RuntimeOutputError     the runner printed or wrote garbage
      PoolError                root of a pool's errors
        UnknownMemberError
        RequirementError       no device can ever meet it
        LeaseTimeoutError
        LeaseLostError         another process may hold the device now
        DeviceHeldError        a holder of another ledger has it
        NotificationError      a webhook, a command or mail did not take one
        LedgerError            the file of all leases cannot be used
      StoreError               root of the results store's errors
        MissingStoreError      no database to read
        StoreUnavailableError  cannot be reached, read or written
          StoreLostError   its server went away
        NotStoredError         no such run or alert, or nothing that a gate can compare with
        RunConflictError       contradicts the stored run
        CorruptRunError        not written by qnnfarm
        MetricError            not registered, or a value that it cannot have
        TelemetryRecordError   an invalid series of samples
        ArtifactError          a file that is kept with a run cannot be kept or read
      OutputCheckError         a speed with a wrong output
      NightlyBusyError         another process works on the night of a plan
      VirtualDeviceError       root of virtual devices' errors
        UnknownVirtualDeviceError
        VirtualDeviceConfinementError   this machine grants no namespace
        AdbProtocolError       a peer that does not speak ADB

`str(error)` is one line for the user: the fault, its place, and advice.
"""

from dataclasses import field
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar

from buildlib.error_base import QnnfarmError
from buildlib.error_base import one_line as one_line  # noqa: PLC0414 - for all who raise these
from harness.codes import explain_end
from harness.words import pluralize

# Exit codes of all commands, which docs/exit-codes.md explains to users
GOOD = 0
BAD = 1
NO_ANSWER = 2
INTERRUPTED = 130

MEANINGS = MappingProxyType(
    {
        GOOD: "done, and what was asked about is good",
        BAD: "what was asked about is bad: a failed cell or check, a regression, a wrong output",
        NO_ANSWER: "no answer: wrong use, or a file or device that cannot be used",
        INTERRUPTED: "interrupted",
    }
)


def help_text() -> str:
    """List them for the end of a help text."""
    return "Exit codes: " + "; ".join(f"{code} {words}" for code, words in MEANINGS.items()) + "."


class FailureClass(StrEnum):
    """Part at fault for a failure, which decides whether a plan tries the cell again."""

    DEVICE = "device"
    """The device, or the way to it: another device may do better."""
    RUNNER = "runner"
    LEASE = "lease"
    """Somebody took the device away: the cell runs again, and nobody is to blame."""
    OUTPUT = "output"
    USE = "use"
    """The request is impossible: a plan never tries again."""


class HarnessError(QnnfarmError):
    """Root of everything `harness` raises on purpose.

    Its class attributes say what an error means, to pools, plans, tests and lists alike.

    Attributes:
        failure_class: part at fault.
        quarantine_weight: how much it counts against its device; 0 says nothing about the device.
        needs_recovery: the device must be reached again before its next use.
        loses_device: the device was gone, so there is no result: a lease ends, and a test has an
            error, not a failure.
        is_infrastructure: the adb server or the host in front of devices failed, hence all devices
            behind it at once.
        ends_plan: nothing can be recorded any more, so a plan ends.
        device_state: how a list shows a device that cannot be opened because of it.
    """

    failure_class: ClassVar[FailureClass] = FailureClass.USE
    quarantine_weight: ClassVar[float] = 0.0
    needs_recovery: ClassVar[bool] = False
    loses_device: ClassVar[bool] = False
    is_infrastructure: ClassVar[bool] = False
    ends_plan: ClassVar[bool] = False
    device_state: ClassVar[str] = "unusable"


class WrongUseError(HarnessError):
    """An option or argument that cannot be used."""

    reason: str
    template = "{reason}"


class HostFileError(HarnessError):
    """A file of this host is missing, unreadable, no file, or changes while it is used."""

    path: str
    reason: str
    template = "cannot use the file {path!r}: {reason}"


class RuntimeChoiceError(HarnessError):
    """No runtime can run this container on this device."""

    device: str
    reason: str
    template = "cannot run on {device}: {reason}"


class GenieMissingError(HarnessError):
    """Genie, or part of it, missing on this machine for devices of a kind.

    Attributes:
        soc: of the devices.
        reason: the missing part, and how to get it.
    """

    soc: str
    reason: str
    template = "no Genie and QNN to put on {soc} devices: {reason}"


class LibrariesFetchError(HarnessError):
    """The libraries for other devices could not be downloaded.

    Attributes:
        wanted: the distribution, or its file.
    """

    wanted: str
    reason: str
    template = "cannot fetch {wanted}: {reason}"


class PromptTooLongError(HarnessError):
    """Prompt and answer do not fit into the context.

    Attributes:
        prompt_tokens: including the bos that the runtime prepends.
        most_prompt: tokens that a prompt may have, with bos.
        context: tokens that prompt and answer may have together.
    """

    prompt_tokens: int
    new_tokens: int
    most_prompt: int
    context: int

    def __str__(self) -> str:
        return self._fill(
            "the prompt has {prompt} (with bos), and {new_tokens} are to be generated: this "
            "container takes prompts of up to {most_prompt}, and {context} tokens in all",
            prompt=pluralize(self.prompt_tokens, "token"),
        )


class ConfigFileError(HarnessError, ValueError):
    """A plan, a pool, a recipe or another file of settings that cannot be used.

    Attributes:
        path: of the file; `recipe` for one that is not a file.
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


class PipelineError(HarnessError, RuntimeError):
    """A pipeline, its manifest or its model cannot do that."""

    reason: str
    template = "{reason}"


# Devices, and the adb servers in front of them


class AdbServerError(HarnessError):
    """The adb server cannot be reached or started, or another program answers."""

    failure_class = FailureClass.DEVICE
    needs_recovery = True
    loses_device = True
    is_infrastructure = True
    device_state = "unreachable"
    address: str
    reason: str
    template = "adb server {address}: {reason}"


class NoDeviceError(HarnessError):
    """There is no device, or not the requested one.

    Attributes:
        wanted: the requested serial, if one was named.
        present: `serial (state)` of each device that the adb server knows.
        host: of that server, if it is another than this one.
    """

    failure_class = FailureClass.DEVICE
    needs_recovery = True
    loses_device = True
    device_state = "absent"
    wanted: str | None
    present: tuple[str, ...] = ()
    host: str = ""

    def __str__(self) -> str:
        serial = "" if self.wanted is None else " {wanted!r}"
        present = "; connected: {present}" if self.present else ""
        if self.host:
            advice = "connect it to that host, and see `adb devices` there"
            return self._fill("no adb device" + serial + " at {host}" + present + ": " + advice)
        return self._fill(
            "no adb device" + serial + present + ": plug a phone in with USB debugging on, "
            "or start a virtual device with `qnnfarm device start NAME --soc SM8750`"
        )


class SeveralDevicesError(HarnessError):
    """No device was named, and several are connected; or several have the serial that was named.

    Attributes:
        serials: the names to choose from.
        shared: the serial that they share.
    """

    device_state = "ambiguous"
    serials: tuple[str, ...]
    shared: str = ""

    def __str__(self) -> str:
        template = "{number} adb devices are connected: choose one with --device or ANDROID_SERIAL"
        if self.shared:
            template = "{number} adb devices have the serial {shared}: name one by its USB port"
        return self._fill(template + ": {serials}", number=len(self.serials))


# Hosts over SSH


class HostError(HarnessError):
    """A host over SSH cannot be used, by its configuration or its key, for example.

    It says nothing about the devices behind the host, which are recovered, not accused; a plan
    goes on with devices of other hosts, and a test loses its device.

    Attributes:
        host: as the user wrote it.
    """

    failure_class = FailureClass.DEVICE
    needs_recovery = True
    loses_device = True
    is_infrastructure = True
    device_state = "unreachable"
    host: str
    reason: str
    template = "host {host} cannot be used: {reason}"


class HostUnreachableError(HostError):
    """The host does not answer, or does not speak SSH."""

    template = "host {host} cannot be reached over SSH: {reason}"


class HostAuthError(HostError):
    """The host accepts none of the user's keys."""


# One device


class DeviceError(HarnessError):
    """Root of failures on one device.

    Attributes:
        serial: the device's name on the adb server.
        member: its name in the pool that leased it; empty without one.
    """

    failure_class = FailureClass.DEVICE
    serial: str
    member: str = field(default="", init=False)

    def _fill(self, template: str, **more: object) -> str:
        has_member = self.member and self.member != self.serial
        name = f"{self.member} ({self.serial})" if has_member else self.serial
        return super()._fill(template, serial=name, **more)


class DeviceConnectError(DeviceError):
    """The adb server could not connect to a TCP device."""

    quarantine_weight = 1.0
    needs_recovery = True
    loses_device = True
    device_state = "absent"
    reason: str
    template = "cannot connect to device {serial}: {reason}"


class DeviceUnauthorizedError(DeviceError):
    """The device does not accept the key of the adb server."""

    needs_recovery = True
    loses_device = True
    device_state = "unauthorized"
    advice: str = (
        "confirm the dialog on its screen, or, if it is virtual, use an adb server of the user who "
        "started it"
    )
    template = "device {serial} does not accept the adb server's key: {advice}"


class DeviceLostError(DeviceError):
    """The device went away, or offline, in the middle of an action."""

    quarantine_weight = 1.0
    needs_recovery = True
    loses_device = True
    device_state = "offline"
    action: str
    reason: str
    template = "device {serial} went away during {action}: {reason}"


class DeviceNotReadyError(DeviceError):
    """The adb server has the device, but in a state in which it runs no commands.

    Attributes:
        state: in the server's words, e.g. `offline` or `recovery`.
    """

    quarantine_weight = 1.0
    needs_recovery = True
    loses_device = True
    state: str
    advice: str
    template = "device {serial} is in state {state}: {advice}"


class DeviceTimeoutError(DeviceError):
    """An action on the device exceeded its time limit."""

    quarantine_weight = 1.0
    needs_recovery = True
    action: str
    timeout_s: float
    log_tail: str = ""

    def __str__(self) -> str:
        tail = "; last output: {log_tail:300}" if self.log_tail.strip() else ""
        return self._fill("device {serial}: {action:120} took longer than {timeout_s:g} s" + tail)


class DeviceCommandError(DeviceError):
    """A command on the device failed.

    Attributes:
        log_tail: the end of the command's stderr, or else of its stdout.
    """

    command: str
    exit_status: int
    log_tail: str

    def __str__(self) -> str:
        tail = "{log_tail:300}" if self.log_tail.strip() else "it wrote nothing"
        return self._fill(
            "device {serial}: {command:120} failed with status {exit_status}: " + tail
        )


class DeviceTransferError(DeviceError):
    """The device refused to take or give a file, or gave an impossible one."""

    path: str
    reason: str
    template = "device {serial}, file {path!r}: {reason}"


class DeviceFullError(DeviceError):
    """The device has too little free space.

    Attributes:
        needed_bytes: size of the write; `None` where the device only said that it is full.
        free_bytes: free on the device.
        evictable_bytes: size of all that can be evicted from our store there, which is too little.
    """

    path: str
    needed_bytes: int | None
    free_bytes: int | None
    evictable_bytes: int | None = None

    def __str__(self) -> str:
        needed = "" if self.needed_bytes is None else ", {needed_bytes:,} bytes needed"
        free = "" if self.free_bytes is None else ", {free_bytes:,} free"
        evictable = "" if self.evictable_bytes is None else ", {evictable_bytes:,} evictable"
        sizes = needed + free + evictable
        return self._fill("device {serial} is full at {path}" + sizes + ": remove files from it")


class DeviceUnsupportedError(DeviceError):
    """An action that this device, or its type of device, cannot do."""

    failure_class = FailureClass.USE
    action: str
    reason: str
    template = "device {serial} cannot do this: {action}: {reason}"


class DeploymentCorruptError(DeviceError):
    """A file arrived on the device with other bytes than were sent; it was removed there."""

    quarantine_weight = 2.0
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        digest = "{found}" if self.found.strip() else "unknown"
        return self._fill(
            "device {serial} holds {name!r} with SHA-256 " + digest + " after the push of "
            "{expected!r}: try again; if it happens again, its storage or the way there is at fault"
        )


class ConditionsNotMetError(DeviceError):
    """The device did not reach the state that a measured run needs.

    Attributes:
        condition: `thermal_gate`, `charge` or `battery_health`.
        waited_s: time that the device was given.
    """

    condition: str
    reason: str
    waited_s: float
    template = (
        "device {serial} is not fit for a measured run after {waited_s:.0f} s, "
        "{condition}: {reason}"
    )


class RunnerError(DeviceError):
    """The runner on the device crashed, hung or refused its input.

    Attributes:
        reason: how it ended, in words.
        exit_status: of the runner; 128 + n when signal n ended it.
    """

    failure_class = FailureClass.RUNNER
    quarantine_weight = 1.0
    exit_code = 1
    command: str
    reason: str
    exit_status: int | None
    log_tail: str

    def __str__(self) -> str:
        end = self._fill("device {serial}: {command} {reason}")
        log = f"; it said: {self._last_lines()}" if self.log_tail.strip() else ""
        explained = explain_end(self.log_tail, self.exit_status)
        return f"{end}{log}" + (f"; {explained}" if explained else "")

    def _last_lines(self) -> str:
        """Return the last line, where it ended, after the library's last errors, why it ended."""
        *before, last = map(one_line, self.log_tail.strip().splitlines())
        errors = [line for line in before if "[ERROR]" in line and line != last]
        return " | ".join([*dict.fromkeys(errors[-2:]), last])[:400]


class RuntimeOutputError(DeviceError):
    """The runner on the device printed or wrote garbage."""

    failure_class = FailureClass.OUTPUT
    quarantine_weight = 1.0
    exit_code = 1
    reason: str
    template = "device {serial}: {reason}"


# Virtual devices


class VirtualDeviceError(HarnessError):
    """Root of the errors of virtual devices, and the error of those without a class."""

    __match_args__ = ("reason",)
    device_state = "absent"
    template = "{reason}"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.__post_init__()


class UnknownVirtualDeviceError(VirtualDeviceError):
    """There is no virtual device with this name."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        names = "known are {known}" if self.known else "there are none yet"
        return self._fill("no virtual device {name!r}: " + names)


class VirtualDeviceConfinementError(VirtualDeviceError):
    """Namespace of a virtual device refused by this machine's kernel."""

    name: str
    reason: str
    template = (
        "virtual device {name} cannot be confined on this machine ({reason}): "
        "`qnnfarm device start {name} --unconfined` starts it with a shell that may do here "
        "whatever you may"
    )


class AdbProtocolError(VirtualDeviceError):
    """A peer that violates the ADB protocol; its connection is closed."""

    reason: str
    template = "{reason}"


# Pools and plans


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


class NightlyBusyError(HarnessError):
    """Another process works on a night of the same plan."""

    folder: str
    template = "another `qnnfarm nightly` works on the nights in {folder}: wait for it, or stop it"


# The results store


class StoreError(HarnessError):
    """Root of the results store's errors."""


class MissingStoreError(StoreError):
    """There is no results database to read."""

    location: str
    template = "no results database at {location}: `qnnfarm bench --db` makes one"


class StoreUnavailableError(StoreError):
    """The results database cannot be reached, read or written, or is none of this qnnfarm."""

    ends_plan = True
    location: str
    reason: str
    template = "cannot use the results database {location}: {reason}"


class StoreLostError(StoreUnavailableError):
    """The database's server went away, or cut a connection or a transaction."""


class NotStoredError(StoreError):
    """The results database has no such run, alert, or results of a baseline."""

    location: str
    wanted: str
    template = "{location} has no {wanted}"


class RunConflictError(StoreError):
    """A write contradicts the run in the results database."""

    location: str
    run_id: str
    reason: str
    template = "cannot write run {run_id} to {location}: {reason}"


class CorruptRunError(StoreError):
    """A run in the results database that qnnfarm cannot have written."""

    location: str
    run_id: str
    reason: str
    template = "run {run_id} in {location} is damaged: {reason}"


class MetricError(StoreError):
    """A metric that is not registered, or a value that it cannot have."""

    reason: str
    template = "{reason}"


class TelemetryRecordError(StoreError):
    """An invalid telemetry series."""

    failure_class = FailureClass.OUTPUT
    channel: str
    reason: str
    template = "telemetry channel {channel!r} is not usable: {reason}"


class ArtifactError(StoreError):
    """A file that is kept with a run cannot be kept or read."""

    ends_plan = True
    location: str
    reason: str
    template = "cannot use the artifact {location}: {reason}"


class OutputCheckError(HarnessError):
    """The output is wrong, so its speed says nothing."""

    failure_class = FailureClass.OUTPUT
    exit_code = 1
    device: str
    reason: str
    template = "the output on {device} is wrong, so its speed is void: {reason}"
