"""Services that a client can open by name (AOSP packages/modules/adb, SERVICES.TXT)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from plugins.virtual_android.connection import DaemonConnection, Service
from plugins.virtual_android.forwards import Forwards
from plugins.virtual_android.shell import ShellHost, open_shell
from plugins.virtual_android.stream import Stream, StreamClosedError
from plugins.virtual_android.sync import SyncHost, open_sync

FEATURES = (
    "shell_v2",
    "stat_v2",
    "ls_v2",
    "sendrecv_v2",
    "remount_shell",
    "fixed_push_mkdir",
    "fixed_push_symlink_timestamp",
)
"""Optional parts of the protocol that the device speaks. No `cmd`: there is no package manager."""
_REFUSALS = {
    b"root:": b"adbd cannot run as root in production builds\n",
    b"unroot:": b"adbd not running as root\n",
    b"disable-verity:": b"verity cannot be disabled on a virtual device\n",
    b"enable-verity:": b"verity cannot be enabled on a virtual device\n",
    b"usb:": b"a virtual device has no USB\n",
}


@dataclass(frozen=True, slots=True)
class Services:
    """All services of a device; a connection calls `open`.

    Attributes:
        reboot: asks the device to reboot; returns at once.
    """

    shell: ShellHost
    sync: SyncHost
    forwards: Forwards
    reboot: Callable[[], None]

    def open(self, connection: DaemonConnection, name: bytes) -> Service | None:
        """Return the service of that name, or `None`."""
        return (
            open_shell(self.shell, name)
            or open_sync(self.sync, name)
            or self._control(name)
            or self.forwards.open(connection, name)
        )

    def _control(self, name: bytes) -> Service | None:
        if name in {b"reboot:", b"reboot"}:
            return self._reboot
        if name.startswith(b"reboot:"):
            return _reply(b"a virtual device has no " + name[7:40] + b"\n")
        if name.startswith(b"tcpip:"):
            return _reply(b"a virtual device keeps its port\n")
        return _reply(_REFUSALS[name]) if name in _REFUSALS else None

    async def _reboot(self, stream: Stream) -> None:
        stream.close()
        self.reboot()


def _reply(text: bytes) -> Service:
    async def reply(stream: Stream) -> None:
        with contextlib.suppress(StreamClosedError):
            await stream.write(text)

    return reply
