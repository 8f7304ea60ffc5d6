"""The `Device` Protocol and its data types."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Progress = Callable[[int], None]
"""Called with the number of bytes transferred since the call before."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command on a device.

    Attributes:
        stdout: decoded as UTF-8, what is none replaced; a note marks what was left out of an
            output longer than was asked for.
        left: processes that went on with its output open when it had ended, as `PID COMMAND`;
            what they write from then on is lost.
    """

    exit_status: int
    stdout: str
    stderr: str
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Battery:
    """Charge in percent, temperature in degrees Celsius; `None` what the device does not tell."""

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
        free_bytes: what may still be written under the work root.
        system: the operating system in its own words, e.g. `Android 15`, `Debian GNU/Linux 12`.
        build: the build's name, `ro.build.display.id`.
        fingerprint: `ro.build.fingerprint`; of a Linux machine, its kernel.
        ram_bytes: memory that the kernel manages, which is less than what the maker states.
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


class Device(Protocol):
    """A device that runs a POSIX shell.

    All methods raise `DeviceLostError` when it goes away, `DeviceTimeoutError` when their
    `timeout_s` is over, which counts from the call and covers all that it does, and
    `DeviceUnauthorizedError` when it does not let us in.
    """

    @property
    def serial(self) -> str:
        """The name by which it is addressed."""
        ...

    @property
    def type(self) -> str:
        """Device type, which says how it is reached."""
        ...

    @property
    def work_root(self) -> str:
        """The folder on it that is ours, `$TMPDIR/qnnfarm`; it need not exist yet."""
        ...

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """Ask the device for its properties."""
        ...

    def free_bytes(self, *, timeout_s: float = 30.0) -> int | None:
        """Return the free space under the work root; `None` if the device cannot tell."""
        ...

    def shell(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        stdin: bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        max_output: int = 4 << 20,
    ) -> CommandResult:
        """Run a script (text) or one command (words, which need no quoting).

        `check` says whether an exit status other than 0 raises, `max_output` how many bytes to
        keep of each of stdout and stderr. When it ends by an exception, whatever that is, the
        command is killed on the device with all that it started. It ends when its shell does: what
        it started in the background may go on, and is not waited for even if it holds the output.

        Raises:
            DeviceCommandError: it failed, and `check` is set.
        """
        ...

    def stream(
        self,
        command: str | Sequence[str],
        *,
        on_output: Callable[[bytes], None],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command and hand on its stdout and stderr as they come.

        When it ends by an exception (of `on_output` too, or a `KeyboardInterrupt`), the command is
        killed on the device with all that it started. An exit status other than 0 raises nothing.
        """
        ...

    def forward(self, remote: str) -> AbstractContextManager[tuple[str, int]]:
        """Yield an address of this host that leads to `remote`, `tcp:PORT` on the device.

        Raises:
            ValueError: `remote` has another form.
        """
        ...

    def boot_id(self, *, timeout_s: float = 30.0) -> str:
        """Return the id of its boot, which each boot changes."""
        ...

    def reboot(self, *, timeout_s: float = 300.0) -> None:
        """Reboot it, and return when it is usable again with another boot id.

        Raises:
            DeviceCommandError: it does not let us.
            DeviceUnsupportedError: devices of this type cannot.
        """
        ...

    def push(
        self,
        local: Path,
        remote: str,
        *,
        timeout_s: float = 600.0,
        mode: int | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file to the device, with its mtime; gives its size, which is checked there.

        Raises:
            DeviceFullError, DeviceTransferError
        """
        ...

    def push_many(
        self,
        items: Iterable[PushItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files in one go; gives the bytes sent. Sizes on the device are not checked."""
        ...

    def pull(
        self,
        remote: str,
        local: Path,
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file from the device; `local` appears only once it is whole."""
        ...

    def pull_many(
        self,
        items: Iterable[PullItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files from the device in one go; gives the bytes received.

        Each appears only once it is whole, but unlike with `pull`, none is synced to the disk.
        """
        ...
