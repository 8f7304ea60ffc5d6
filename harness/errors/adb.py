"""What goes wrong with an adb server, and with finding a device."""

from harness.errors.base import HarnessError, one_line


class AdbServerError(HarnessError):
    """The adb server cannot be reached or started, or what answers is no adb server."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"adb server {self.address}: {one_line(self.reason)}"


class AdbAddressError(AdbServerError):
    """An environment variable names an adb server in a way that cannot be used."""

    def __init__(self, variable: str, value: str, reason: str) -> None:
        super().__init__(value, reason)
        self.args = (variable, value, reason)
        self.variable = variable
        self.value = value

    def __str__(self) -> str:
        return f"{self.variable}={self.value!r} cannot be used: {one_line(self.reason)}"


class NoDeviceError(HarnessError):
    """There is no device to use, or not the one that was asked for.

    Attributes:
        wanted: the serial that was asked for, if one was.
        present: `serial (state)` of each device that the adb server does know.
    """

    def __init__(self, wanted: str | None, present: tuple[str, ...] = ()) -> None:
        super().__init__(wanted, present)
        self.wanted = wanted
        self.present = present

    def __str__(self) -> str:
        what = "no adb device" if self.wanted is None else f"no adb device {self.wanted!r}"
        has = f"; connected: {', '.join(self.present)}" if self.present else ""
        return (
            f"{what}{has}: plug a phone in with USB debugging on, "
            "or start a virtual device with `qnnfarm device start NAME --soc SM8750`"
        )


class SeveralDevicesError(HarnessError):
    """No device was named, and more than one could be meant."""

    def __init__(self, serials: tuple[str, ...]) -> None:
        super().__init__(serials)
        self.serials = serials

    def __str__(self) -> str:
        return (
            f"{len(self.serials)} adb devices are connected: choose one with --device or "
            f"ANDROID_SERIAL: {', '.join(self.serials)}"
        )
