"""Errors of devices, of the adb servers and hosts in front of them, and of virtual devices."""

from dataclasses import field

from buildlib.error_base import one_line
from harness.errors.base import FailureClass, HarnessError
from harness.errors.codes import explain_end


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
