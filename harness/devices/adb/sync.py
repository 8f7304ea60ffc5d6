"""The sync protocol: files to and from a device, and their sizes there.

Protocol: AOSP `packages/modules/adb/docs/dev/sync.md`. Files of one session are sent, and asked
for, one after the other without waiting for the answers in between, as many small ones would cost
a round trip each; a refusal is seen while a file is still being sent.
"""

import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from harness.devices.adb.connection import Connection, FailReply, StreamClosed

_DATA_MAX = 64 * 1024
_STEP_BYTES = 16 * _DATA_MAX
_REQUEST = struct.Struct("<4sI")
_STAT_V1 = struct.Struct("<III")
_STAT_V2 = struct.Struct("<IQQIIIIQqqq")
_PATH_MAX = 1024
_ASKED_AHEAD = 64
"""Requests for files that wait for their answers; they fit into the buffers on the way."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Stat of a path on a device.

    Attributes:
        size: in bytes; modulo 2^32 on devices without `stat_v2`.
    """

    mode: int
    size: int

    @property
    def is_file(self) -> bool:
        """True if it is a regular file."""
        return stat.S_ISREG(self.mode)


class SyncSession:
    """An open `sync:` service; its methods raise `FailReply` where the device refuses.

    Attributes:
        answered: how many of the sent files the device has confirmed.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unanswered = 0
        self.answered = 0

    def send(
        self,
        source: BinaryIO,
        remote: str,
        *,
        mode: int,
        mtime: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Send a whole file; it is there for certain only once `finish` has returned.

        `on_progress` is called with the number of bytes sent since the call before.

        Returns:
            How many bytes it held at the beginning.

        Raises:
            FailReply: the device refused this file or one before, with its reason; `answered`
                tells which. Or the file became shorter meanwhile.
            StreamClosed, DeadlineExceeded: see `Connection`.
        """
        path = _encode(f"{remote},{stat.S_IFREG | mode}")
        head = _REQUEST.pack(b"SEND", len(path)) + path
        end = _REQUEST.pack(b"DONE", mtime & 0xFFFFFFFF)
        file = source.fileno()
        size = os.fstat(file).st_size
        if size <= _DATA_MAX:
            self._send_small(head, file, size, end)
            if on_progress and size:
                on_progress(size)
            return size
        self._or_refusal(lambda: self._connection.send(head))
        self._unanswered += 1
        if self._connection.has_input():
            self._read_answer()
        for start in range(0, size, _STEP_BYTES):
            step = min(_STEP_BYTES, size - start)
            self._or_refusal(partial(self._send_data, file, start, step))
            if self._connection.has_input():
                self._read_answer()
            if on_progress:
                on_progress(step)
        self._or_refusal(lambda: self._connection.send(end))
        return size

    def finish(self) -> None:
        """Wait until the device has confirmed all that was sent."""
        while self._unanswered:
            self._read_answer()

    def receive(
        self, remote: str, sink: BinaryIO, on_progress: Callable[[int], None] | None = None
    ) -> int:
        """Write a file of the device to `sink`; gives its size."""
        self._connection.send(_receive_request(remote))
        return self._receive_asked(sink, on_progress)

    def receive_many(
        self,
        remotes: Sequence[str],
        sinks: Iterable[AbstractContextManager[BinaryIO]],
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Write files of the device to `sinks`, in order; gives the sum of their sizes.

        `answered` counts the files that came whole.
        """
        total = 0
        self._connection.send(b"".join(map(_receive_request, remotes[:_ASKED_AHEAD])))
        for number, opening in enumerate(sinks):
            with opening as sink:
                total += self._receive_asked(sink, on_progress)
            self.answered += 1
            # One at a time: each carries the acknowledgement of what came, which the adb server
            # would otherwise await for up to 40 ms before it passes the next small file on.
            for remote in remotes[number + _ASKED_AHEAD : number + _ASKED_AHEAD + 1]:
                self._connection.send(_receive_request(remote))
        return total

    def _receive_asked(self, sink: BinaryIO, on_progress: Callable[[int], None] | None) -> int:
        total = 0
        while True:
            kind, length = self._header()
            if kind == b"DONE":
                return total
            self._expect(kind, b"DATA", length)
            while length:
                data = self._connection.receive_some(min(length, _DATA_MAX))
                sink.write(data)
                length -= len(data)
                total += len(data)
                if on_progress:
                    on_progress(len(data))

    def stat(self, remote: str, *, v2: bool) -> FileStat | None:
        """Return the stat of `remote`, links not followed; `None` if it does not exist."""
        path = _encode(remote)
        kind = b"LST2" if v2 else b"STAT"
        self._connection.send(_REQUEST.pack(kind, len(path)) + path)
        answer = self._connection.receive(4)
        if answer != kind:
            raise FailReply(f"the answer to {kind!r} was {answer!r}")
        if v2:
            fields = _STAT_V2.unpack(self._connection.receive(_STAT_V2.size))
            error, mode, size = fields[0], fields[3], fields[7]
            return None if error else FileStat(mode, size)
        mode, size, _ = _STAT_V1.unpack(self._connection.receive(_STAT_V1.size))
        return FileStat(mode, size) if mode else None

    def _send_small(self, head: bytes, file: int, size: int, done: bytes) -> None:
        """Send a file of one DATA packet, its head and its end in one piece."""
        data = os.pread(file, size, 0) if size else b""
        if len(data) < size:
            raise FailReply("the file became shorter while it was sent")
        body = _REQUEST.pack(b"DATA", size) + data if size else b""
        self._or_refusal(lambda: self._connection.send(head + body + done))
        self._unanswered += 1
        if self._connection.has_input():
            self._read_answer()

    def _send_data(self, file: int, start: int, count: int) -> None:
        """Send a part of an open file as DATA packets."""
        end = start + count
        for offset in range(start, end, _DATA_MAX):
            length = min(_DATA_MAX, end - offset)
            head = _REQUEST.pack(b"DATA", length)
            self._connection.send_file(head, file, offset, length)

    def _or_refusal(self, send: Callable[[], None]) -> None:
        """Send; where the device has closed, the refusal that it may have sent before counts."""
        try:
            send()
        except StreamClosed as closed:
            try:
                self.finish()
            except StreamClosed:
                raise closed from None
            raise

    def _read_answer(self) -> None:
        kind, length = self._header()
        self._expect(kind, b"OKAY", length)
        self._unanswered -= 1
        self.answered += 1

    def _header(self) -> tuple[bytes, int]:
        kind, length = _REQUEST.unpack(self._connection.receive(_REQUEST.size))
        return kind, length

    def _expect(self, kind: bytes, wanted: bytes, length: int) -> None:
        if kind == b"FAIL":
            raise FailReply(self._connection.receive(length).decode("utf-8", "replace"))
        if kind != wanted or length > _DATA_MAX:
            raise FailReply(f"instead of {wanted!r} the device sent {kind!r} with {length}")


def _receive_request(remote: str) -> bytes:
    path = _encode(remote)
    return _REQUEST.pack(b"RECV", len(path)) + path


def _encode(path: str) -> bytes:
    data = path.encode("utf-8", "surrogateescape")
    if len(data) > _PATH_MAX or b"\0" in data:
        raise FailReply(f"a path of {len(data)} bytes cannot be sent")
    return data
