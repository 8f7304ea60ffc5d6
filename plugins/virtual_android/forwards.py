"""Ports forwarded over the connection: to sockets of the device, and from it to the host.

`adb forward` opens a stream to a socket here. `adb reverse` asks for a listener here, which opens a
stream to a socket of the host for each of its clients; it ends with the connection of the adb
server. Answers to `reverse:` are those of AOSP's `handle_forward_request`: OKAY, or FAIL with a
reason, and texts with their length in four hexadecimal digits before them.
"""

import asyncio
import contextlib
import errno
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from plugins.virtual_android.connection import DaemonConnection, Service
from plugins.virtual_android.filesystem import DeviceFilesystem
from plugins.virtual_android.injection import Activity, Injector
from plugins.virtual_android.stream import Stream, StreamClosedError

_CHUNK = 256 * 1024
_CONNECT_TIMEOUT_S = 10.0
_LOOPBACK = "127.0.0.1"
_MOST_LISTENERS = 256

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Connect = Callable[[], Coroutine[Any, Any, _Ends]]
_OnClient = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Listener:
    """A forward from the device to the host.

    Attributes:
        target: socket of the host.
        server: `None` where device and host have the port in common.
    """

    target: str
    server: asyncio.Server | None = None

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


class Forwards:
    """Forwards of one device in both directions."""

    def __init__(self, filesystem: DeviceFilesystem, faults: Injector) -> None:
        self._filesystem = filesystem
        self._faults = faults
        self._listeners: dict[DaemonConnection, dict[str, _Listener]] = {}

    def open(self, connection: DaemonConnection, name: bytes) -> Service | None:
        """Return the service for `reverse:`, or for a socket of the device; `None` for others."""
        kind, _, address = name.decode("utf-8", "surrogateescape").partition(":")
        if kind == "reverse":
            return functools.partial(self._answer_reverse, connection, address)
        connect = self._connector(kind, address)
        return None if connect is None else functools.partial(self._serve, connect=connect)

    def forget(self, connection: DaemonConnection) -> None:
        """Close the listeners of a connection that is lost."""
        for listener in self._listeners.pop(connection, {}).values():
            listener.close()

    def _connector(self, kind: str, address: str) -> _Connect | None:
        if not address:
            return None
        if kind == "tcp":
            port = _port(address)
            return functools.partial(asyncio.open_connection, _LOOPBACK, port) if port else None
        path = self._socket_path(kind, address)
        return functools.partial(asyncio.open_unix_connection, path) if path else None

    def _socket_path(self, kind: str, address: str) -> str | None:
        if kind == "localabstract":
            return "\0" + address
        if kind in {"localfilesystem", "local"}:
            return self._filesystem.resolve(address)
        return None

    async def _serve(self, stream: Stream, *, connect: _Connect) -> None:
        with contextlib.suppress(StreamClosedError):
            async with self._faults.activity("forward") as activity:
                await _bridge(stream, activity, connect)

    async def _answer_reverse(
        self, connection: DaemonConnection, request: str, stream: Stream
    ) -> None:
        try:
            answer = await self._reverse(connection, request)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            answer = b"FAIL" + _text(reason or "it cannot be done")
        with contextlib.suppress(StreamClosedError):
            await stream.write(answer)

    async def _reverse(self, connection: DaemonConnection, request: str) -> bytes:
        listeners = self._listeners.setdefault(connection, {})
        action, _, rest = request.partition(":")
        if action == "list-forward":
            lines = (f"host-1 {name} {one.target}\n" for name, one in listeners.items())
            return _text("".join(lines))
        if action == "killforward-all":
            self.forget(connection)
            return b"OKAY"
        if action == "killforward":
            if rest not in listeners:
                raise ValueError(f"listener '{rest}' not found")
            listeners.pop(rest).close()
            return b"OKAY"
        if action != "forward":
            raise ValueError(f"a virtual device has no reverse:{action}")
        rebind = not rest.startswith("norebind:")
        name, _, target = rest.removeprefix("norebind:").partition(";")
        return await self._listen(connection, name, target, rebind=rebind)

    async def _listen(
        self, connection: DaemonConnection, name: str, target: str, *, rebind: bool
    ) -> bytes:
        listeners = self._listeners[connection]
        if not target or len(listeners) >= _MOST_LISTENERS:
            raise ValueError("too many listeners" if target else f"malformed forward spec '{name}'")
        former = listeners.get(name)
        if former is not None and not rebind:
            raise ValueError("cannot rebind existing socket")
        if former is not None and former.server is not None:
            former.target = target
            return b"OKAY"
        listener = _Listener(target)
        listener.server = server = await self._start_server(connection, name, listener)
        port_text = b""
        if name == "tcp:0" and server is not None:
            port = server.sockets[0].getsockname()[1]
            name, port_text = f"tcp:{port}", _text(str(port))
        if not connection.online:
            listener.close()
            raise ValueError("the connection is gone")
        self._listeners.setdefault(connection, {})[name] = listener
        return b"OKAY" + port_text

    async def _start_server(
        self, connection: DaemonConnection, name: str, listener: _Listener
    ) -> asyncio.Server | None:
        async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async def connected() -> _Ends:
                return reader, writer

            async def serve(stream: Stream) -> None:
                await stream.opened()
                await self._serve(stream, connect=connected)

            connection.open_stream(listener.target.encode("utf-8", "surrogateescape"), serve)

        kind, _, address = name.partition(":")
        if kind != "tcp":
            path = self._socket_path(kind, address) if address else None
            if path is None:
                raise ValueError(f"unknown local portion '{name}'")
            return await asyncio.start_unix_server(on_client, path)
        port = _port(address)
        if port is None:
            raise ValueError(f"unknown local portion '{name}'")
        try:
            return await asyncio.start_server(on_client, _LOOPBACK, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if name == listener.target:
                return None  # device and host share the loopback: its clients reach it already
            reason = f"cannot bind listener: this host, whose ports the device shares, uses {port}"
            raise ValueError(reason) from None


def _port(text: str) -> int | None:
    """Return a port, which may be 0; `None` for any other text."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) > 0xFFFF:
        return None
    return int(text)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")[:0xFFFF]
    return b"%04x%s" % (len(data), data)


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
