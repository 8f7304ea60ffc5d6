"""SEND and SND2: a file comes from the client."""

import asyncio
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import AdbProtocolError
from harness.virtual_device.injection import Activity
from harness.virtual_device.storage import Storage
from harness.virtual_device.stream import ExactReader, Stream
from harness.virtual_device.sync import wire
from harness.virtual_device.sync.incoming import IncomingFile, make_link

_BATCH = 1024 * 1024
_MAX_LINK = 4096


@dataclass(frozen=True, slots=True)
class SendRequest:
    """What the client wants to create."""

    path: str
    mode: int


async def receive_file(
    stream: Stream,
    reader: ExactReader,
    request: SendRequest,
    storage: Storage | None,
    activity: Activity,
) -> bool:
    """Take a file or link and confirm it; false where that failed and the session is to end.

    A failure is reported at once. What the client has sent meanwhile is then read and dropped,
    because many clients look at the answer only once they have sent everything.

    Raises:
        StreamClosedError: the client went away; nothing is left of the file.
        AdbProtocolError: the client does not keep to the protocol.
    """
    data = _Data(reader)
    try:
        if stat.S_ISLNK(request.mode):
            await _receive_link(data, request)
        else:
            await _receive_bytes(data, request, storage, activity)
    except OSError as error:
        await stream.write(wire.failure(error.strerror or str(error)))
        async for _ in data.batches():
            pass
        return False
    await activity.passed(len(wire.SUCCESS))
    await stream.write(wire.SUCCESS)
    return True


class _Data:
    """The DATA messages of one file up to DONE.

    Attributes:
        mtime: seconds since 1970 from DONE, once `batches` has ended.
    """

    def __init__(self, reader: ExactReader) -> None:
        self.mtime = 0
        self._reader = reader
        self._done = False

    async def batches(self) -> AsyncIterator[list[memoryview]]:
        """Contents in order, gathered to about a megabyte; can be resumed after an exception."""
        parts: list[memoryview] = []
        size = 0
        while not self._done:
            ident, length = wire.REQUEST.unpack(await self._reader.exactly(wire.REQUEST.size))
            if ident == b"DONE":
                self._done = True
                self.mtime = length
            elif ident != b"DATA" or length > wire.MAX_DATA:
                raise AdbProtocolError(f"{ident!r} of {length} bytes where file data belongs")
            else:
                size += length
                while length:
                    part = await self._reader.some(length)
                    parts.append(part)
                    length -= len(part)
            if parts and (size >= _BATCH or self._done):
                yield parts
                parts, size = [], 0


async def _receive_bytes(
    data: _Data, request: SendRequest, storage: Storage | None, activity: Activity
) -> None:
    file: IncomingFile | None = None
    try:
        file = await asyncio.to_thread(IncomingFile, request.path)
        received = 0
        async for parts in data.batches():
            count = sum(len(part) for part in parts)
            received += count
            await activity.passed(count)
            if storage is not None:
                storage.claim(count)
            await asyncio.to_thread(file.write, parts)
        if flips := activity.damage(received):
            await asyncio.to_thread(file.flip, flips)
        await asyncio.to_thread(file.commit, request.mode, data.mtime)
    finally:
        if file is not None:
            file.abort()
            if storage is not None:
                storage.recount()


async def _receive_link(data: _Data, request: SendRequest) -> None:
    target = bytearray()
    async for parts in data.batches():
        for part in parts:
            target += part
        if len(target) > _MAX_LINK:
            raise AdbProtocolError("target of a link above the limit")
    name = bytes(target).rstrip(b"\0")
    await asyncio.to_thread(make_link, Path(request.path), name, data.mtime)
