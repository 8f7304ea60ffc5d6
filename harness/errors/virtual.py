"""What goes wrong with virtual devices."""

from harness.errors.base import HarnessError, one_line


class VirtualDeviceError(HarnessError):
    """Root of what virtual devices raise."""


class VirtualDeviceNameError(VirtualDeviceError):
    """A name that no virtual device can have."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"a virtual device cannot be named {one_line(self.name, 80)!r}: use up to 40 letters, "
            "digits, `-` and `_`, with a letter or digit first"
        )


class UnknownVirtualDeviceError(VirtualDeviceError):
    """There is no virtual device of that name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name = name
        self.known = known

    def __str__(self) -> str:
        known = f"known are {', '.join(self.known)}" if self.known else "there are none yet"
        return f"no virtual device {self.name!r}: {known}"


class VirtualDeviceChangeError(VirtualDeviceError):
    """A virtual device exists already, made otherwise than is asked for now."""

    def __init__(self, name: str, what: str, made_with: str, wanted: str) -> None:
        super().__init__(name, what, made_with, wanted)
        self.name = name
        self.what = what
        self.made_with = made_with
        self.wanted = wanted

    def __str__(self) -> str:
        return (
            f"virtual device {self.name} exists with {self.what} {self.made_with}, not "
            f"{self.wanted}: choose another name, or `qnnfarm device rm {self.name}` first"
        )


class VirtualDeviceRecordError(VirtualDeviceError):
    """The record of a virtual device cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"record of a virtual device {self.path} cannot be used: {one_line(self.reason)}"


class VirtualDeviceStartError(VirtualDeviceError):
    """The process of a virtual device did not come up.

    Attributes:
        log_tail: the end of the log that the process wrote.
    """

    def __init__(self, name: str, reason: str, log_tail: str, log_path: str) -> None:
        super().__init__(name, reason, log_tail, log_path)
        self.name = name
        self.reason = reason
        self.log_tail = log_tail
        self.log_path = log_path

    def __str__(self) -> str:
        tail = f": {one_line(self.log_tail)}" if self.log_tail.strip() else ""
        return (
            f"virtual device {self.name} did not start: {self.reason}{tail} (log {self.log_path})"
        )


class VirtualDeviceBusyError(VirtualDeviceError):
    """Another command has been working on the virtual device for too long."""

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(name, waited_s)
        self.name = name
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"virtual device {self.name}: another command has held it for {self.waited_s:g} s: "
            "try again once that is done"
        )


class VirtualDeviceControlError(VirtualDeviceError):
    """A running virtual device cannot be told something."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"virtual device {self.name} cannot be told that: {one_line(self.reason)}"


class VirtualHostError(VirtualDeviceError):
    """The process that hosts several virtual devices did not come up."""

    def __init__(self, reason: str, log_path: str) -> None:
        super().__init__(reason, log_path)
        self.reason = reason
        self.log_path = log_path

    def __str__(self) -> str:
        return f"virtual devices did not start: {one_line(self.reason)} (log {self.log_path})"


class FaultSpecError(VirtualDeviceError):
    """A text or a value that is no fault."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, reason)
        self.text = text
        self.reason = reason

    def __str__(self) -> str:
        return f"not a fault {one_line(self.text, 120)!r}: {one_line(self.reason)}"


class HeatSettingError(VirtualDeviceError):
    """A setting of the heat model that does not exist, or a value that it cannot have."""

    def __init__(self, name: str, value: float, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name = name
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        name = one_line(self.name, 60)
        return f"heat setting {name!r} cannot be {self.value:g}: {one_line(self.allowed)}"


class AdbKeyError(VirtualDeviceError):
    """A file or message that holds no usable adb key."""


class AdbProtocolError(VirtualDeviceError):
    """A peer that does not keep to the ADB protocol; its connection is closed."""
