"""One stream inside a connection, between a service such as `shell:` and one client.

Flow control is the transport's: each side sends one WRTE and waits for its OKAY. A stream
acknowledges a message while less than `RECEIVE_LIMIT` bytes wait to be read, so that the
peer's next message travels while the last one is processed, and memory stays bounded.
"""

import asyncio
from collections import deque
from typing import Protocol

from plugins.virtual_android.protocol import AdbCommand

RECEIVE_LIMIT = 3 * 1024 * 1024


class StreamClosedError(Exception):
    """The peer closed the stream, or the connection is gone: raised by reads and writes."""


class Multiplexer(Protocol):
    """The connection as its streams use it."""

    max_payload: int

    def send(
        self,
        command: AdbCommand,
        arg0: int,
        arg1: int,
        payload: bytes | bytearray | memoryview = b"",
    ) -> None:
        """Queue one message."""

    async def wait_writable(self) -> None:
        """Wait until the connection takes more payload."""

    def forget(self, stream: "Stream") -> None:
        """Drop a stream that is closed."""


class Stream:
    """A byte stream in both directions between one service and one client.

    Attributes:
        remote_id: the peer's id; 0 until it has granted a stream that we opened.
    """

    def __init__(self, multiplexer: Multiplexer, local_id: int, remote_id: int) -> None:
        self.local_id = local_id
        self.remote_id = remote_id
        self._multiplexer = multiplexer
        self._chunks: deque[memoryview] = deque()
        self._buffered = 0
        self._unacknowledged = False
        self._peer_closed = False
        self._closed = False
        self._readable = asyncio.Event()
        self._may_send = asyncio.Event()
        if remote_id:
            self._may_send.set()
        self._write_lock = asyncio.Lock()

    @property
    def max_payload(self) -> int:
        """Largest payload of one message to the peer."""
        return self._multiplexer.max_payload

    @property
    def has_data(self) -> bool:
        """True if a read would not wait for data."""
        return bool(self._chunks)

    async def opened(self) -> None:
        """Wait until the peer has granted or refused a stream that we opened."""
        await self._may_send.wait()

    async def read(self, limit: int = RECEIVE_LIMIT) -> memoryview:
        """Read between 1 and `limit` bytes; empty at the end of the stream.

        The memory belongs to the caller.
        """
        while not self._chunks:
            if self._peer_closed or self._closed:
                return memoryview(b"")
            self._readable.clear()
            await self._readable.wait()
        chunk = self._chunks.popleft()
        if len(chunk) > limit:
            self._chunks.appendleft(chunk[limit:])
            chunk = chunk[:limit]
        self._buffered -= len(chunk)
        self._acknowledge()
        return chunk

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, in order with other writers.

        Returns once the last message is under way. `data` may be changed again after the next
        write has begun sending, that is after the peer's OKAY.
        """
        view = memoryview(data)
        async with self._write_lock:
            while view:
                await self._may_send.wait()
                await self._multiplexer.wait_writable()
                if self._peer_closed or self._closed:
                    raise StreamClosedError
                part = view[: self.max_payload]
                view = view[self.max_payload :]
                self._may_send.clear()
                self._multiplexer.send(AdbCommand.WRTE, self.local_id, self.remote_id, part)

    def close(self) -> None:
        """End the stream from this side; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if not self._peer_closed and self.remote_id:
            self._multiplexer.send(AdbCommand.CLSE, self.local_id, self.remote_id)
        self._chunks.clear()
        self._wake()
        self._multiplexer.forget(self)

    def on_data(self, payload: bytes | bytearray) -> bool:
        """Take the payload of a WRTE; false if the peer sent it before the last OKAY."""
        if self._unacknowledged:
            return False
        self._unacknowledged = True
        if payload and not self._closed:
            self._chunks.append(memoryview(payload))
            self._buffered += len(payload)
            self._readable.set()
        self._acknowledge()
        return True

    def on_ready(self, remote_id: int) -> None:
        """Take an OKAY; the first one grants a stream that we opened."""
        self.remote_id = self.remote_id or remote_id
        self._may_send.set()

    def on_close(self) -> None:
        """Take a CLSE, or the end of the connection."""
        self._peer_closed = True
        self._wake()

    def _wake(self) -> None:
        self._readable.set()
        self._may_send.set()

    def _acknowledge(self) -> None:
        if self._unacknowledged and self._buffered < RECEIVE_LIMIT and not self._peer_closed:
            self._unacknowledged = False
            self._multiplexer.send(AdbCommand.OKAY, self.local_id, self.remote_id)


class ExactReader:
    """Reader of a stream in pieces of a given size, for protocols with their own framing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    @property
    def has_more(self) -> bool:
        """True if something can be read without waiting."""
        return bool(self._rest) or self._stream.has_data

    async def some(self, limit: int) -> memoryview:
        """Read between 1 and `limit` bytes without copying them."""
        if not self._rest:
            self._rest = await self._stream.read()
            if not self._rest:
                raise StreamClosedError
        part, self._rest = self._rest[:limit], self._rest[limit:]
        return part

    async def exactly(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        if len(self._rest) >= count:
            part, self._rest = bytes(self._rest[:count]), self._rest[count:]
            return part
        parts = bytearray()
        while len(parts) < count:
            parts += await self.some(count - len(parts))
        return bytes(parts)
