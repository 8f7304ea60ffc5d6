"""`tcp:`, `localabstract:`, `localfilesystem:`: what `adb forward` reaches on the device."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from harness.virtual_device.connection import Service
from harness.virtual_device.filesystem import DeviceFilesystem
from harness.virtual_device.injection import Activity, Injector
from harness.virtual_device.stream import Stream, StreamClosedError

_CHUNK = 256 * 1024
_CONNECT_TIMEOUT_S = 10.0

_Connect = Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]


def open_forward(filesystem: DeviceFilesystem, faults: Injector, name: bytes) -> Service | None:
    """The service for the name of a socket on the device; `None` if it is not one."""
    kind, colon, address = name.decode("utf-8", "surrogateescape").partition(":")
    if not colon or not address:
        return None
    if kind == "tcp":
        if not address.isascii() or not address.isdecimal() or not 0 < int(address) < 65536:
            return None
        port = int(address)

        async def tcp(stream: Stream) -> None:
            await _bridge(stream, faults, asyncio.open_connection("127.0.0.1", port))

        return tcp
    if kind == "localabstract":
        return _unix(faults, "\0" + address)
    if kind in {"localfilesystem", "local"}:
        return _unix(faults, filesystem.resolve(address))
    return None


def _unix(faults: Injector, path: str) -> Service:
    async def unix(stream: Stream) -> None:
        await _bridge(stream, faults, asyncio.open_unix_connection(path))

    return unix


async def _bridge(stream: Stream, faults: Injector, connect: _Connect) -> None:
    try:
        activity = await faults.begin("forward")
    except StreamClosedError:
        connect.close()
        return
    try:
        reader, writer = await asyncio.wait_for(connect, _CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError, ValueError):
        activity.end()
        return
    tasks = {
        asyncio.create_task(_to_socket(stream, writer, activity)),
        asyncio.create_task(_to_client(reader, stream, activity)),
    }
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        activity.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _to_socket(stream: Stream, writer: asyncio.StreamWriter, activity: Activity) -> None:
    with contextlib.suppress(OSError, StreamClosedError):
        while data := await stream.read():
            await activity.passed(len(data))
            writer.write(data)
            await writer.drain()


async def _to_client(reader: asyncio.StreamReader, stream: Stream, activity: Activity) -> None:
    with contextlib.suppress(OSError, StreamClosedError):
        while data := await reader.read(_CHUNK):
            await activity.passed(len(data))
            await stream.write(data)
