"""RECV and RCV2: a file goes to the client."""

import asyncio
import errno
import os
import stat

from harness.virtual_device.injection import Activity
from harness.virtual_device.stream import Stream
from harness.virtual_device.sync import wire

_HEAD = wire.DATA_HEADER.size


class _Block:
    """One message to the client, laid out as DATA messages whose bodies the disk fills.

    The file is read straight into the gaps between the headers, so nothing is copied.
    """

    def __init__(self, size: int) -> None:
        count = max(1, size // (_HEAD + wire.MAX_DATA))
        self._body = min(wire.MAX_DATA, size - _HEAD)
        self._memory = bytearray(count * (_HEAD + self._body))
        view = memoryview(self._memory)
        step = _HEAD + self._body
        self._bodies = [view[i * step + _HEAD : (i + 1) * step] for i in range(count)]

    def fill(self, descriptor: int) -> memoryview:
        """Read on in a file; what to send, empty at the end of the file. Raises: OSError."""
        count = os.readv(descriptor, self._bodies)
        whole, rest = divmod(count, self._body)
        step = _HEAD + self._body
        for index in range(whole):
            wire.DATA_HEADER.pack_into(self._memory, index * step, b"DATA", self._body)
        used = whole * step
        if rest:
            wire.DATA_HEADER.pack_into(self._memory, used, b"DATA", rest)
            used += _HEAD + rest
        return memoryview(self._memory)[:used]


async def transmit_file(stream: Stream, path: str, activity: Activity) -> None:
    """Send a file, or say why not.

    Two blocks take turns: while one is on its way, the other is filled. A block is filled again
    only after the write of the other one has begun, hence after the client's OKAY for it.

    Raises:
        StreamClosedError: the client went away.
    """
    descriptor = -1
    try:
        descriptor = await asyncio.to_thread(_open_for_reading, path)
        blocks = (_Block(stream.max_payload), _Block(stream.max_payload))
        turn = 0
        while part := await asyncio.to_thread(blocks[turn].fill, descriptor):
            await activity.passed(len(part))
            await stream.write(part)
            turn = 1 - turn
    except OSError as error:
        await stream.write(wire.failure(error.strerror or str(error)))
        return
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    await stream.write(wire.REQUEST.pack(b"DONE", 0))


def _open_for_reading(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
