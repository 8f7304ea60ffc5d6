"""Transports: how commands and files reach a device."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, BinaryIO, Protocol

from harness.clock import Deadline
from harness.devices.base import DeviceProperties, Progress, PushItem
from harness.devices.commands import Sink
from harness.devices.forward import Forward

if TYPE_CHECKING:
    from harness.devices.device import Device


class Transport(Protocol):
    """Way to one device, and what differs with the system at its end. Thread-safe.

    Methods that take a device ask it by commands, which are not guarded.

    Attributes:
        serial: the name by which the device is addressed.
        type: its device type.
    """

    serial: str
    type: str

    def execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        """Run a script in a process group of its own; gives its exit status.

        Raises bare failures, which `typed` knows.
        """
        ...

    def typed(
        self, action: str, timeout_s: float, log: Callable[[], str] | None = None
    ) -> AbstractContextManager[None]:
        """Raise bare failures of the block as errors of the harness.

        Args:
            action: what the block does.
            timeout_s: its time limit, for the error.
            log: returns the end of what a command had written.
        """
        ...

    def send(
        self,
        action: str,
        items: Sequence[PushItem],
        *,
        mtime: int,
        check: bool,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Send regular files, all with that `mtime`; gives the bytes sent.

        `check` has the size of each compared on the device, where that takes a question of its own.
        """
        ...

    def receive(
        self,
        action: str,
        remotes: Sequence[str],
        sinks: Iterable[AbstractContextManager[BinaryIO]],
        *,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Write files of the device to `sinks`, opened one by one; gives the bytes received."""
        ...

    def forward(self, port: int) -> Forward:
        """Open a forward to a port of the device, which the caller closes."""
        ...

    def find_root(self, device: "Device", timeout_s: float) -> str:
        """Return the path of our folder, which need not exist yet."""
        ...

    def properties(self, device: "Device", timeout_s: float) -> DeviceProperties:
        """Ask the device for its properties."""
        ...

    def reboot(self, device: "Device", timeout_s: float) -> None:
        """Make it reboot; that it goes away meanwhile is no failure."""
        ...

    def is_up(self, device: "Device", deadline: Deadline) -> bool:
        """Return whether it says that it has come up; may fail as a device does that has not."""
        ...
