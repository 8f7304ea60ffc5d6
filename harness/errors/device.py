"""What one device does wrong."""

from harness.errors.base import HarnessError, one_line

_LONGEST_SAID = 400


class DeviceError(HarnessError):
    """Root of what one device does wrong.

    Attributes:
        serial: the device, by the name under which the adb server knows it.
    """

    def __init__(self, serial: str, *details: object) -> None:
        super().__init__(serial, *details)
        self.serial = serial


class DeviceConnectError(DeviceError):
    """The adb server could not connect to a TCP device."""

    def __init__(self, serial: str, reason: str) -> None:
        super().__init__(serial, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot connect to device {one_line(self.serial)}: {one_line(self.reason)}"


class DeviceUnauthorizedError(DeviceError):
    """The device does not accept this host's adb key."""

    def __str__(self) -> str:
        return (
            f"device {one_line(self.serial)} does not accept this host's adb key: confirm the "
            "dialog on its screen, or start it as the user whose key it holds"
        )


class DeviceLostError(DeviceError):
    """The device went away, or is offline, in the middle of something.

    Attributes:
        action: what was being done.
    """

    def __init__(self, serial: str, action: str, reason: str) -> None:
        super().__init__(serial, action, reason)
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"device {one_line(self.serial)} went away during {one_line(self.action)}: "
            f"{one_line(self.reason)}"
        )


class DeviceTimeoutError(DeviceError):
    """Something on the device took longer than it may."""

    def __init__(self, serial: str, action: str, timeout_s: float, log_tail: str = "") -> None:
        super().__init__(serial, action, timeout_s, log_tail)
        self.action = action
        self.timeout_s = timeout_s
        self.log_tail = log_tail

    def __str__(self) -> str:
        tail = f"; last output: {one_line(self.log_tail)}" if self.log_tail.strip() else ""
        return (
            f"device {one_line(self.serial)}: {one_line(self.action)} took longer than "
            f"{self.timeout_s:g} s{tail}"
        )


class DeviceCommandError(DeviceError):
    """A command on the device failed.

    Attributes:
        log_tail: the end of what the command wrote, stderr first choice.
    """

    def __init__(self, serial: str, command: str, exit_status: int, log_tail: str) -> None:
        super().__init__(serial, command, exit_status, log_tail)
        self.command = command
        self.exit_status = exit_status
        self.log_tail = log_tail

    def __str__(self) -> str:
        tail = one_line(self.log_tail) or "it wrote nothing"
        return (
            f"device {one_line(self.serial)}: {one_line(self.command, 120)} failed with status "
            f"{self.exit_status}: {tail}"
        )


class DeviceTransferError(DeviceError):
    """The device refused to take or give a file, or gave what cannot be."""

    def __init__(self, serial: str, path: str, reason: str) -> None:
        super().__init__(serial, path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"device {one_line(self.serial)}, file {self.path!r}: {one_line(self.reason)}"


class DevicePathError(DeviceTransferError):
    """A path on the device does not exist, or is a folder where a file is meant."""


class DevicePermissionError(DeviceTransferError):
    """The device's shell user may not write or read a path."""


class DeviceFullError(DeviceError):
    """The device has not the space that is needed.

    Attributes:
        needed_bytes: what was to be written; `None` where the device only said that it is full.
        free_bytes: what it had free.
        evictable_bytes: what could have been evicted from our store there, which was not enough.
    """

    def __init__(
        self,
        serial: str,
        path: str,
        needed_bytes: int | None,
        free_bytes: int | None,
        evictable_bytes: int | None = None,
    ) -> None:
        super().__init__(serial, path, needed_bytes, free_bytes, evictable_bytes)
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.evictable_bytes = evictable_bytes

    def __str__(self) -> str:
        needed = "" if self.needed_bytes is None else f", {self.needed_bytes:,} bytes needed"
        free = "" if self.free_bytes is None else f", {self.free_bytes:,} free"
        if self.evictable_bytes is not None:
            free += f", {self.evictable_bytes:,} evictable"
        where = f"device {one_line(self.serial)} is full at {one_line(self.path)}"
        return f"{where}{needed}{free}: remove files from it"


class DeviceUnsupportedError(DeviceError):
    """Something that devices of its type, or this one, cannot do."""

    def __init__(self, serial: str, action: str, reason: str) -> None:
        super().__init__(serial, action, reason)
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"device {one_line(self.serial)} cannot do this: {one_line(self.action)}: "
            f"{one_line(self.reason)}"
        )


class DeploymentCorruptError(DeviceError):
    """A file arrived on the device as something else than was sent; it was removed there."""

    def __init__(self, serial: str, name: str, expected: str, found: str) -> None:
        super().__init__(serial, name, expected, found)
        self.name = name
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return (
            f"device {one_line(self.serial)} holds {self.name!r} with SHA-256 "
            f"{one_line(self.found) or 'unknown'} after the push of {self.expected!r}: "
            "its storage or cable is at fault"
        )


class RunnerError(DeviceError):
    """The runner on the device crashed, hung or refused its input.

    Attributes:
        reason: how it ended, in words.
        exit_status: of the runner; 128 + n when signal n ended it.
    """

    exit_code = 1

    def __init__(
        self, serial: str, command: str, reason: str, exit_status: int | None, log_tail: str
    ) -> None:
        super().__init__(serial, command, reason, exit_status, log_tail)
        self.command = command
        self.reason = reason
        self.exit_status = exit_status
        self.log_tail = log_tail

    def __str__(self) -> str:
        said = f"; it said: {self._said()}" if self.log_tail.strip() else ""
        ended = f"{one_line(self.command)} {one_line(self.reason)}"
        return f"device {one_line(self.serial)}: {ended}{said}"

    def _said(self) -> str:
        """The last line, which tells where it ended, and the library's errors before it: why."""
        *before, last = map(one_line, self.log_tail.strip().splitlines())
        errors = [line for line in before if "[ERROR]" in line and line != last]
        return " | ".join([*dict.fromkeys(errors[-2:]), last])[:_LONGEST_SAID]


class RuntimeOutputError(DeviceError):
    """The runner on the device printed or wrote what cannot be its answer."""

    exit_code = 1

    def __init__(self, serial: str, reason: str, log_tail: str) -> None:
        super().__init__(serial, reason, log_tail)
        self.reason = reason
        self.log_tail = log_tail

    def __str__(self) -> str:
        return f"device {one_line(self.serial)}: {one_line(self.reason)}"


class DeviceSpecError(HarnessError):
    """What names a device cannot."""

    def __init__(self, spec: str, reason: str) -> None:
        super().__init__(spec, reason)
        self.spec = spec
        self.reason = reason

    def __str__(self) -> str:
        return f"{one_line(self.spec)!r} names no device: {self.reason}"
