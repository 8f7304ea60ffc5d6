"""Data types of devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Progress = Callable[[int], None]
"""Called with the number of bytes transferred since the call before."""

USB_PORT = "usb:"
"""Begin of a serial that stands for whatever device is plugged in at a USB port."""


# What transports raise, which `Device` turns into typed errors


class FailReply(Exception):  # noqa: N818 - an answer, turned into a typed error by the caller
    """The server or the device answered FAIL with a message, or nonsense."""


class StreamClosed(Exception):  # noqa: N818
    """The other side closed the connection in the middle."""


class Stalled(Exception):  # noqa: N818
    """Nothing went either way for `seconds`, although the deadline is later."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class ServerUnreachable(Exception):  # noqa: N818
    """Refused connection: no server listens at the address."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command on a device.

    Attributes:
        stdout: decoded as UTF-8, other bytes replaced; a note stands for the middle of an output
            longer than was asked for.
        left: processes that went on with its output open when it had ended, as `PID COMMAND`;
            their later output is lost.
    """

    exit_status: int
    stdout: str
    stderr: str
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Battery:
    """Charge in percent, temperature in degrees Celsius; `None` where the device does not tell."""

    level_percent: float | None
    temperature_c: float | None
    charging: bool | None


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of a device; empty text or `None` where it says nothing.

    Attributes:
        serial: the name by which it is addressed.
        hardware_serial: `ro.serialno`, which stays when the address changes.
        soc: `ro.soc.model`, e.g. `SM8750`.
        hexagon: its Hexagon architecture, e.g. `v79`, where the SoC is in the catalog.
        emulator: whether it has no Hexagon processor: Android says that it runs on no hardware,
            or the machine is not of ARM's kind.
        free_bytes: free space under the work root.
        system: the operating system in its own words, e.g. `Android 15`, `Debian GNU/Linux 12`.
        build: the build's name, `ro.build.display.id`.
        fingerprint: `ro.build.fingerprint`; of a Linux machine, its kernel.
        ram_bytes: memory that the kernel manages, less than the maker states.
        page_bytes: size of its memory pages.
        clocks: limits of the processor clocks in Hz, by `cpu_cap_hz:CPU` (allowed now) and
            `cpu_max_hz:CPU` (of the hardware); the lowest CPU of those that share a clock names it.
    """

    serial: str
    hardware_serial: str
    manufacturer: str
    model: str
    soc: str
    hexagon: str | None
    abi: str
    android_version: str
    sdk: int | None
    emulator: bool
    free_bytes: int | None
    battery: Battery | None
    system: str = ""
    build: str = ""
    fingerprint: str = ""
    ram_bytes: int | None = None
    page_bytes: int | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushItem:
    """One file of a `push_many`: `mode` holds permission bits."""

    local: Path
    remote: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class PullItem:
    """One file of a `pull_many`."""

    remote: str
    local: Path
