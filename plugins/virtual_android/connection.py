"""One connection of an adb server to the device: handshake, then many streams."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from harness.errors import AdbProtocolError
from plugins.virtual_android.auth import TOKEN_SIZE, is_signed, parse_public_key
from plugins.virtual_android.protocol import (
    MAX_PAYLOAD,
    MIN_PAYLOAD,
    VERSION_WITH_CHECKSUMS,
    VERSION_WITHOUT_CHECKSUMS,
    AdbCommand,
    FrameDecoder,
    Message,
    pack_header,
)
from plugins.virtual_android.stream import Stream

log = logging.getLogger(__name__)

Service = Callable[[Stream], Coroutine[Any, Any, None]]
ServiceOpener = Callable[["DaemonConnection", bytes], Service | None]

_AUTH_TOKEN, _AUTH_SIGNATURE, _AUTH_PUBLIC_KEY = 1, 2, 3
_MAX_STREAMS = 1024
_MAX_ATTEMPTS = 64
_MAX_SHOWN = 100
_WRITE_HIGH_WATER = 4 * 1024 * 1024
_JOIN_BELOW = 16 * 1024


class _State(Enum):
    GREETING = auto()
    AUTHENTICATING = auto()
    ONLINE = auto()
    CLOSED = auto()


class DaemonConnection(asyncio.BufferedProtocol):
    """The device's end of one TCP connection.

    Only the handshake is answered before the peer has signed a token with a key in `keys()`.
    A violation of the protocol closes the connection.

    Attributes:
        max_payload: the negotiated limit for payloads in both directions.
    """

    def __init__(
        self,
        banner: str,
        keys: Callable[[], list[RSAPublicKey]],
        open_service: ServiceOpener,
        on_lost: Callable[["DaemonConnection"], None],
    ) -> None:
        self.max_payload = MIN_PAYLOAD
        self._banner = banner
        self._keys = keys
        self._open_service = open_service
        self._on_lost = on_lost
        self._state = _State.GREETING
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._token = b""
        self._attempts = 0
        self._streams: dict[int, Stream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next_id = 1
        self._stalled = False

    @property
    def online(self) -> bool:
        """True if the peer has authenticated."""
        return self._state is _State.ONLINE

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up and wait for the peer's CNXN."""
        self._transport = cast("asyncio.Transport", transport)
        # asyncio does so only for sockets made with an explicit protocol number. Without it, the
        # end of every command waits 40 ms for the peer's delayed acknowledgement.
        connected = self._transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._stalled:
            self._transport.pause_reading()
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        """End every stream; its service then cleans up."""
        log.info("connection lost%s", f": {exc}" if exc else "")
        self._state = _State.CLOSED
        self._stalled = False
        self._writable.set()
        for stream in list(self._streams.values()):
            stream.on_close()
        self._on_lost(self)

    def pause_writing(self) -> None:
        """Read no further requests while the peer does not read its answers."""
        self._writable.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again, as the peer does."""
        if self._stalled:
            return
        self._writable.set()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio calls it so
        """Return the part of the message that asyncio receives into next."""
        return self._decoder.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle a message that became complete."""
        try:
            message = self._decoder.commit(nbytes)
            if message is not None and self._state is not _State.CLOSED:
                self._dispatch(message)
        except AdbProtocolError as error:
            log.warning("closing connection: %s", error)
            self.abort()

    def abort(self) -> None:
        """Break the connection at once, as an unplugged cable does."""
        self._state = _State.CLOSED
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send queued messages, then close."""
        if self._transport is not None:
            self._transport.close()

    def stall(self) -> None:
        """Stop reading and sending payload, as a device that hangs."""
        self._stalled = True
        self._writable.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """End a stall."""
        self._stalled = False
        self.resume_writing()

    async def wait_writable(self) -> None:
        """Wait until the send queue is below the high-water mark."""
        await self._writable.wait()

    def send(
        self,
        command: AdbCommand,
        arg0: int,
        arg1: int,
        payload: bytes | bytearray | memoryview = b"",
    ) -> None:
        """Queue one message; without effect once the connection is closed."""
        if self._transport is None or self._state is _State.CLOSED:
            return
        checked = self._decoder.peer_version < VERSION_WITHOUT_CHECKSUMS or not self.online
        header = pack_header(command, arg0, arg1, payload, with_checksum=checked)
        if len(payload) < _JOIN_BELOW:
            self._transport.write(header + payload)
        else:
            self._transport.write(header)
            self._transport.write(payload)

    def open_stream(self, name: bytes, service: Service) -> None:
        """Open a stream to a service of the peer's, and let `service` use it."""
        stream = self._new_stream(0)
        self.send(AdbCommand.OPEN, stream.local_id, 0, name + b"\0")
        self._start(service, stream, name)
        if not self.online or len(self._streams) > _MAX_STREAMS:
            stream.on_close()

    def forget(self, stream: Stream) -> None:
        """Drop a stream that its service has closed."""
        self._streams.pop(stream.local_id, None)

    async def wait_for_services(self) -> None:
        """Wait until the services of this connection have cleaned up; call after `abort()`."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def _dispatch(self, message: Message) -> None:
        if message.command is AdbCommand.CNXN:
            self._greet(message)
        elif message.command is AdbCommand.AUTH and self._state is _State.AUTHENTICATING:
            self._authenticate(message)
        elif not self.online:
            raise AdbProtocolError(f"{message.command.name} before authentication")
        elif message.command is AdbCommand.OPEN:
            self._open(message)
        elif message.command in {AdbCommand.WRTE, AdbCommand.OKAY, AdbCommand.CLSE}:
            self._route(message)
        else:
            raise AdbProtocolError(f"unexpected {message.command.name}")

    def _greet(self, message: Message) -> None:
        if self._state is not _State.GREETING:
            raise AdbProtocolError("a second CNXN")
        if message.arg0 < VERSION_WITH_CHECKSUMS or message.arg1 < MIN_PAYLOAD:
            raise AdbProtocolError(
                f"version {message.arg0:#x} with payload limit {message.arg1} is not supported"
            )
        self._decoder.peer_version = min(message.arg0, VERSION_WITHOUT_CHECKSUMS)
        self.max_payload = min(message.arg1, MAX_PAYLOAD)
        self._state = _State.AUTHENTICATING
        self._challenge()

    def _challenge(self) -> None:
        self._token = os.urandom(TOKEN_SIZE)
        self.send(AdbCommand.AUTH, _AUTH_TOKEN, 0, self._token)

    def _authenticate(self, message: Message) -> None:
        self._attempts += 1
        if self._attempts > _MAX_ATTEMPTS:
            raise AdbProtocolError("too many attempts to authenticate")
        if message.arg0 == _AUTH_SIGNATURE:
            signature = bytes(message.payload)
            if any(is_signed(key, self._token, signature) for key in self._keys()):
                self._accept()
            else:
                self._challenge()
        elif message.arg0 == _AUTH_PUBLIC_KEY:
            try:
                parse_public_key(bytes(message.payload))
            except ValueError as error:
                raise AdbProtocolError(f"offered key: {error}") from None
            log.warning("refused a key that is not this user's; the peer stays unauthorized")
        else:
            raise AdbProtocolError(f"AUTH of unknown kind {message.arg0}")

    def _accept(self) -> None:
        log.info("peer authenticated")
        banner = self._banner.encode()
        self.send(AdbCommand.CNXN, VERSION_WITHOUT_CHECKSUMS, MAX_PAYLOAD, banner)
        self._state = _State.ONLINE
        self._decoder.max_payload = MAX_PAYLOAD

    def _open(self, message: Message) -> None:
        remote_id, name = message.arg0, bytes(message.payload).rstrip(b"\0")
        if remote_id == 0:
            raise AdbProtocolError("OPEN without an id")
        service = None
        if len(self._streams) < _MAX_STREAMS:
            service = self._open_service(self, name)
        if service is None:
            log.info("no service %r", name[:_MAX_SHOWN])
            self.send(AdbCommand.CLSE, 0, remote_id)
            return
        stream = self._new_stream(remote_id)
        self.send(AdbCommand.OKAY, stream.local_id, remote_id)
        self._start(service, stream, name)

    def _new_stream(self, remote_id: int) -> Stream:
        stream = Stream(self, self._next_id, remote_id)
        self._next_id = self._next_id % 0x7FFFFFFF + 1
        self._streams[stream.local_id] = stream
        return stream

    def _start(self, service: Service, stream: Stream, name: bytes) -> None:
        task = asyncio.create_task(self._serve(service, stream), name=repr(name[:_MAX_SHOWN]))
        self._tasks[stream.local_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(stream.local_id, None))

    async def _serve(self, service: Service, stream: Stream) -> None:
        try:
            await service(stream)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a service failed")
        finally:
            stream.close()

    def _route(self, message: Message) -> None:
        stream = self._streams.get(message.arg1)
        if stream is None or (stream.remote_id and message.arg0 not in {0, stream.remote_id}):
            return  # sent before our CLSE arrived
        if message.command is AdbCommand.OKAY:
            stream.on_ready(message.arg0)
        elif message.command is AdbCommand.CLSE:
            stream.on_close()
        elif not stream.on_data(message.payload):
            raise AdbProtocolError("WRTE before the OKAY of the last one")
