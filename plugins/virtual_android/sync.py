"""The `sync:` service: STAT, LIST, SEND and RECV, versions 1 and 2.

Structures are little-endian. Functions that block on the disk run outside the event loop.
"""

# ruff: noqa: PTH116, PTH118, PTH208 - pathlib drops the slash at the end that follows a link

import asyncio
import contextlib
import errno
import os
import stat
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import AdbProtocolError
from plugins.virtual_android.connection import Service
from plugins.virtual_android.filesystem import DeviceFilesystem, IncomingFile, make_link
from plugins.virtual_android.injection import Activity, Injector
from plugins.virtual_android.storage import Storage
from plugins.virtual_android.stream import ExactReader, Stream, StreamClosedError

_MAX_PATH = 1024
_MAX_DATA = 64 * 1024

_REQUEST = struct.Struct("<4sI")
"""id, length of the path that follows; also id and length of DATA, mtime of DONE, flags of RCV2."""
_SEND_SETUP = struct.Struct("<4sII")
"""SND2: id, mode, flags."""

_STAT_V1 = struct.Struct("<4sIII")
_STAT_V2 = struct.Struct("<4sIQQIIIIQqqq")
_NAME_LENGTH = struct.Struct("<I")
_LOW = 0xFFFFFFFF
_V1_ENTRY_SIZE = _STAT_V1.size + _NAME_LENGTH.size
_V2_ENTRY_SIZE = _STAT_V2.size + _NAME_LENGTH.size

_SUCCESS = _REQUEST.pack(b"OKAY", 0)
_DONE = _REQUEST.pack(b"DONE", 0)
_BATCH = 1024 * 1024
_MOST_TOGETHER = 64
_MAX_LINK = 4096
_HEAD = _REQUEST.size
_MISSING_ENTRY = _STAT_V1.pack(b"DENT", 0, 0, 0)


def _status(ident: bytes, path: str | bytes) -> bytes:
    """Pack a file's status for STAT, STA2 or LST2, or as the begin of an entry, DENT or DNT2.

    STAT and DENT cut sizes and times to 32 bits and are all zero for a missing file; the others
    tell an errno. STA2 follows a link.
    """
    is_old = ident in {b"STAT", b"DENT"}
    try:
        status = os.stat(path, follow_symlinks=ident == b"STA2")
    except OSError as error:
        if is_old:
            return _STAT_V1.pack(ident, 0, 0, 0)
        return _STAT_V2.pack(ident, error.errno or errno.EIO, *[0] * 10)
    if is_old:
        size, mtime = status.st_size & _LOW, int(status.st_mtime) & _LOW
        return _STAT_V1.pack(ident, status.st_mode, size, mtime)
    return _STAT_V2.pack(
        ident,
        0,
        status.st_dev,
        status.st_ino,
        status.st_mode,
        status.st_nlink & _LOW,
        status.st_uid,
        status.st_gid,
        status.st_size,
        int(status.st_atime),
        int(status.st_mtime),
        int(status.st_ctime),
    )


def _entries(path: str, version: int) -> bytes:
    """List all entries with `.` and `..`; none if the folder cannot be read, as in adbd."""
    ident, end_size = (b"DENT", _V1_ENTRY_SIZE) if version == 1 else (b"DNT2", _V2_ENTRY_SIZE)
    folder = os.fsencode(path)
    answer = bytearray()
    try:
        names = [b".", b"..", *os.listdir(folder)]
    except OSError:
        names = []
    for name in names:
        status = _status(ident, os.path.join(folder, name))
        if status != _MISSING_ENTRY:
            answer += status + _NAME_LENGTH.pack(len(name)) + name
    return bytes(answer + b"DONE".ljust(end_size, b"\0"))


def _failure(text: str) -> bytes:
    data = text.encode("utf-8", "replace")[:_MAX_DATA]
    return _REQUEST.pack(b"FAIL", len(data)) + data


@dataclass(frozen=True, slots=True)
class _SendRequest:
    """File or link that the client wants to create."""

    path: str
    mode: int


class _Data:
    """The DATA messages of one file up to DONE.

    Attributes:
        done: whether the batch that was yielded last is the last of all.
        mtime: seconds since 1970 from DONE, once it is.
    """

    def __init__(self, reader: ExactReader) -> None:
        self.done = False
        self.mtime = 0
        self._reader = reader

    async def batches(self) -> AsyncIterator[list[memoryview]]:
        """Yield the contents in batches of about a megabyte; can be resumed after an exception.

        The last batch may be empty.
        """
        parts: list[memoryview] = []
        size = 0
        while not self.done:
            ident, length = _REQUEST.unpack(await self._reader.exactly(_REQUEST.size))
            if ident == b"DONE":
                self.done = True
                self.mtime = length
            elif ident != b"DATA" or length > _MAX_DATA:
                raise AdbProtocolError(f"{ident!r} of {length} bytes where file data belongs")
            else:
                size += length
                while length:
                    part = await self._reader.some(length)
                    parts.append(part)
                    length -= len(part)
            if size >= _BATCH or self.done:
                yield parts
                parts, size = [], 0


@dataclass(frozen=True, slots=True)
class _SmallFile:
    """A file that has come whole."""

    request: _SendRequest
    parts: list[memoryview]
    flips: list[tuple[int, int]]
    mtime: int

    def write(self) -> None:
        """Bring it to the disk."""
        file = IncomingFile(self.request.path)
        try:
            file.write(self.parts)
            file.flip(self.flips)
            file.commit(self.request.mode, self.mtime)
        except BaseException:
            file.abort()
            raise


def _write_all(files: list[_SmallFile]) -> bytes:
    """Write files and return the answers: the first failure is the last."""
    answers = bytearray()
    for file in files:
        try:
            file.write()
        except OSError as error:
            return bytes(answers + _failure(error.strerror or str(error)))
        answers += _SUCCESS
    return bytes(answers)


class _Receiver:
    """Receives the files and links of one session.

    Small files that came together are written in one turn of a thread and confirmed in one message:
    each turn, and each message with the OKAY to await before the next, takes as long as a file.
    """

    def __init__(self, host: "SyncHost", stream: Stream, reader: ExactReader) -> None:
        self._host = host
        self._stream = stream
        self._reader = reader
        self._small: list[_SmallFile] = []
        self._waiting = 0

    async def receive(self, request: _SendRequest) -> bool:
        """Receive a file or link; false after a failure, which ends the session.

        A failure is reported at once. Data that the client has sent meanwhile is then read and
        dropped, because many clients look at the answer only once they have sent everything.
        """
        data = _Data(self._reader)
        async with self._host.faults.activity("push", detail=request.path) as activity:
            try:
                if stat.S_ISLNK(request.mode):
                    return await self.flush() and await self._receive_link(data, request, activity)
                return await self._receive_file(data, request, activity)
            except OSError as error:
                if await self.flush():
                    await self._stream.write(_failure(error.strerror or str(error)))
                    async for _ in data.batches():
                        pass
                return False

    async def flush(self) -> bool:
        """Write and confirm the small files that have come; false after a failure."""
        if not self._small:
            return True
        files, self._small, self._waiting = self._small, [], 0
        answers = await asyncio.to_thread(_write_all, files)
        await self._stream.write(answers)
        return len(answers) == len(files) * len(_SUCCESS)

    async def settle(self) -> bool:
        """Do so if there is nothing to do it together with; false after a failure."""
        if self._reader.has_more and self._waiting < _BATCH and len(self._small) < _MOST_TOGETHER:
            return True
        return await self.flush()

    async def _receive_file(self, data: "_Data", request: _SendRequest, activity: Activity) -> bool:
        file = IncomingFile(request.path)
        storage = self._host.storage
        is_ours: bool | None = None
        total = 0
        try:
            async for parts in data.batches():
                count = sum(len(part) for part in parts)
                total += count
                await activity.transfer(count)
                if storage.limit_bytes is not None:
                    if is_ours is None:
                        is_ours = await asyncio.to_thread(self._host.filesystem.owns, request.path)
                    if is_ours:
                        storage.claim(count)
                if data.done and total == count:
                    small = _SmallFile(request, parts, activity.draw_flips(count), data.mtime)
                    return await self._take(small, activity)
                if not await self.flush():
                    return False
                await asyncio.to_thread(file.write, parts)
            await asyncio.to_thread(file.flip, activity.draw_flips(total))
            await asyncio.to_thread(file.commit, request.mode, data.mtime)
        except BaseException:
            file.abort()
            if is_ours:
                storage.invalidate()
            raise
        return await self._confirm(activity)

    async def _take(self, file: _SmallFile, activity: Activity) -> bool:
        self._small.append(file)
        self._waiting += sum(len(part) for part in file.parts)
        if self._host.faults.idle and self._host.storage.limit_bytes is None:
            return True
        await activity.transfer(len(_SUCCESS))
        return await self.flush()

    async def _receive_link(self, data: "_Data", request: _SendRequest, activity: Activity) -> bool:
        target = bytearray()
        async for parts in data.batches():
            for part in parts:
                target += part
            if len(target) > _MAX_LINK:
                raise AdbProtocolError("target of a link above the limit")
        name = bytes(target).rstrip(b"\0")
        await asyncio.to_thread(make_link, Path(request.path), name, data.mtime)
        return await self._confirm(activity)

    async def _confirm(self, activity: Activity) -> bool:
        await activity.transfer(len(_SUCCESS))
        await self._stream.write(_SUCCESS)
        return True


class _Block:
    """One message to the client: DATA messages, and DONE behind the last.

    The file is read straight into the gaps between the headers, so nothing is copied.
    """

    def __init__(self, size: int) -> None:
        space = size - len(_DONE)
        count = max(1, space // (_HEAD + _MAX_DATA))
        self._body = min(_MAX_DATA, space - _HEAD)
        self._memory = bytearray(count * (_HEAD + self._body) + len(_DONE))
        view = memoryview(self._memory)
        step = _HEAD + self._body
        self._bodies = [view[i * step + _HEAD : (i + 1) * step] for i in range(count)]

    def fill(self, descriptor: int) -> tuple[memoryview, bool]:
        """Fill the block from a file; return the bytes to send, and whether the file has ended.

        The end goes into the same message: as one of its own, DONE of a small file would wait
        in the adb server for the client's delayed acknowledgement of the data, 40 ms (Nagle).
        """
        size, at_end = self._read(descriptor)
        whole, rest = divmod(size, self._body)
        step = _HEAD + self._body
        for index in range(whole):
            _REQUEST.pack_into(self._memory, index * step, b"DATA", self._body)
        end = whole * step
        if rest:
            _REQUEST.pack_into(self._memory, end, b"DATA", rest)
            end += _HEAD + rest
        if at_end:
            self._memory[end : end + len(_DONE)] = _DONE
            end += len(_DONE)
        return memoryview(self._memory)[:end], at_end

    def _read(self, descriptor: int) -> tuple[int, bool]:
        """Read until the block is full or the file ends; return the count, and whether it ended."""
        count_read = 0
        capacity = len(self._bodies) * self._body
        while count_read < capacity:
            index, offset = divmod(count_read, self._body)
            count = os.readv(descriptor, [self._bodies[index][offset:], *self._bodies[index + 1 :]])
            if not count:
                return count_read, True
            count_read += count
        return count_read, False


class _OutgoingFile:
    """A file being sent, which is opened with its first block and closed with its last."""

    def __init__(self, path: str) -> None:
        self.ended = False
        self._path = path
        self._descriptor = -1

    def fill(self, block: _Block) -> memoryview:
        """Fill a block and return the bytes to send."""
        if self._descriptor < 0:
            self._descriptor = _open_for_reading(self._path)
        data, self.ended = block.fill(self._descriptor)
        if self.ended:
            self.close()
        return data

    def close(self) -> None:
        """Close it; closing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Sender:
    """Sends the files of one session.

    Two blocks take turns: while one is on its way, the other is filled. A block is filled again
    only after the write of the other one has begun, hence after the client's OKAY for it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocks: list[_Block] = []
        self._turn = 0

    async def send(self, path: str, activity: Activity) -> None:
        """Send a file, or the reason of a failure."""
        file = _OutgoingFile(path)
        try:
            while not file.ended:
                data = await asyncio.to_thread(file.fill, self._next_block())
                await activity.transfer(len(data))
                await self._stream.write(data)
        except OSError as error:
            await self._stream.write(_failure(error.strerror or str(error)))
        finally:
            file.close()

    def _next_block(self) -> _Block:
        if len(self._blocks) < 2:
            self._blocks.append(_Block(self._stream.max_payload))
            return self._blocks[-1]
        self._turn = 1 - self._turn
        return self._blocks[1 - self._turn]


def _open_for_reading(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(frozen=True, slots=True)
class SyncHost:
    """Parts of a device that the sync service uses."""

    filesystem: DeviceFilesystem
    storage: Storage
    faults: Injector


def open_sync(host: SyncHost, name: bytes) -> Service | None:
    """Return the service for `sync:`; `None` for other names."""

    async def serve(stream: Stream) -> None:
        with contextlib.suppress(StreamClosedError):
            try:
                session = _Session(host, stream)
                while await session.answer():
                    pass
            except AdbProtocolError as error:
                await stream.write(_failure(str(error)))

    return serve if name == b"sync:" else None


class _Session:
    """The requests of one client, one after the other."""

    def __init__(self, host: SyncHost, stream: Stream) -> None:
        self._host = host
        self._stream = stream
        self._reader = ExactReader(stream)
        self._sender = _Sender(stream)
        self._receiver = _Receiver(host, stream, self._reader)

    async def answer(self) -> bool:
        """Answer one request; false after the last."""
        if not await self._receiver.settle():
            return False
        ident, length = _REQUEST.unpack(await self._reader.exactly(_REQUEST.size))
        sending = ident in {b"SEND", b"SND2"}
        if ident == b"QUIT" or not (sending or await self._receiver.flush()):
            await self._receiver.flush()
            return False
        if length > _MAX_PATH:
            raise AdbProtocolError(f"path of {length} bytes, above the limit of {_MAX_PATH}")
        name = await self._reader.exactly(length)
        if b"\0" in name:
            raise AdbProtocolError("path with a NUL byte")
        if sending:
            return await self._receive(ident, name)
        path = self._resolve(name)
        if ident in {b"RECV", b"RCV2"}:
            if ident == b"RCV2":
                _, flags = _REQUEST.unpack(await self._reader.exactly(_REQUEST.size))
                _refuse_flags(flags)
            async with self._host.faults.activity("pull", detail=path) as activity:
                await self._sender.send(path, activity)
            return True
        async with self._host.faults.activity("list", detail=path):
            return await self._describe(ident, path)

    async def _describe(self, ident: bytes, path: str) -> bool:
        if ident in {b"STAT", b"LST2", b"STA2"}:
            await self._stream.write(await asyncio.to_thread(_status, ident, path))
        elif ident in {b"LIST", b"LIS2"}:
            version = 1 if ident == b"LIST" else 2
            await self._stream.write(await asyncio.to_thread(_entries, path, version))
        else:
            raise AdbProtocolError(f"unknown sync request {ident!r}")
        return True

    async def _receive(self, ident: bytes, name: bytes) -> bool:
        if ident == b"SND2":
            setup = await self._reader.exactly(_SEND_SETUP.size)
            _, mode, flags = _SEND_SETUP.unpack(setup)
            _refuse_flags(flags)
        else:
            name, mode = _split_mode(name)
        return await self._receiver.receive(_SendRequest(self._resolve(name), mode))

    def _resolve(self, name: bytes) -> str:
        return self._host.filesystem.resolve(os.fsdecode(name))


def _split_mode(name: bytes) -> tuple[bytes, int]:
    path, comma, mode = name.rpartition(b",")
    if not comma or not mode.isdigit() or len(mode) > 10:
        raise AdbProtocolError("SEND without a mode")
    return path, int(mode)


def _refuse_flags(flags: int) -> None:
    if flags:
        raise AdbProtocolError(f"transfer flags {flags:#x}, of which none were advertised")
