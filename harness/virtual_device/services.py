"""Services that a client can open by name (AOSP packages/modules/adb, SERVICES.TXT)."""

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from harness.virtual_device.connection import Service
from harness.virtual_device.filesystem import DeviceFilesystem
from harness.virtual_device.injection import Activity, Injector
from harness.virtual_device.shell import ShellHost, open_shell
from harness.virtual_device.stream import Stream, StreamClosedError
from harness.virtual_device.sync import SyncHost, open_sync

_CHUNK = 256 * 1024
_PORT = re.compile("[0-9]{1,5}")
_CONNECT_TIMEOUT_S = 10.0

_Connect = Callable[[], Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

FEATURES = (
    "shell_v2",
    "stat_v2",
    "ls_v2",
    "sendrecv_v2",
    "fixed_push_mkdir",
    "fixed_push_symlink_timestamp",
)
"""Optional parts of the protocol that the device speaks. No `cmd`: there is no package manager."""
_REFUSALS = {
    b"root:": b"adbd cannot run as root in production builds\n",
    b"unroot:": b"adbd not running as root\n",
    b"remount:": b"remount failed\n",
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
    reboot: Callable[[], None]

    def open(self, name: bytes) -> Service | None:
        """Return the service of that name, or `None`."""
        return (
            open_shell(self.shell, name)
            or open_sync(self.sync, name)
            or _open_forward(self.sync.filesystem, self.sync.faults, name)
            or self._control(name)
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


def _open_forward(filesystem: DeviceFilesystem, faults: Injector, name: bytes) -> Service | None:
    """Return the service for `adb forward` to a socket on the device; `None` for other names."""
    kind, colon, address = name.decode("utf-8", "surrogateescape").partition(":")
    if not colon or not address:
        return None
    connect: _Connect
    if kind == "tcp":
        if not _PORT.fullmatch(address) or not 0 < int(address) < 65536:
            return None
        connect = functools.partial(asyncio.open_connection, "127.0.0.1", int(address))
    elif kind == "localabstract":
        connect = functools.partial(asyncio.open_unix_connection, "\0" + address)
    elif kind in {"localfilesystem", "local"}:
        connect = functools.partial(asyncio.open_unix_connection, filesystem.resolve(address))
    else:
        return None

    async def forward(stream: Stream) -> None:
        with contextlib.suppress(StreamClosedError):
            async with faults.activity("forward") as activity:
                await _bridge(stream, activity, connect)

    return forward


async def _bridge(stream: Stream, activity: Activity, connect: _Connect) -> None:
    try:
        reader, writer = await asyncio.wait_for(connect(), _CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError, ValueError):
        return
    tasks = {
        asyncio.create_task(_to_socket(stream, writer, activity)),
        asyncio.create_task(_to_client(reader, stream, activity)),
    }
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _to_socket(stream: Stream, writer: asyncio.StreamWriter, activity: Activity) -> None:
    with contextlib.suppress(OSError, StreamClosedError):
        while data := await stream.read():
            await activity.transfer(len(data))
            writer.write(data)
            await writer.drain()


async def _to_client(reader: asyncio.StreamReader, stream: Stream, activity: Activity) -> None:
    with contextlib.suppress(OSError, StreamClosedError):
        while data := await reader.read(_CHUNK):
            await activity.transfer(len(data))
            await stream.write(data)
