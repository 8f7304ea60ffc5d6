"""Pipes and terminals, read and written without blocking the event loop."""

import asyncio
import contextlib
import errno
import fcntl
import os

_READ_SIZE = 256 * 1024
_PIPE_SIZE = 1024 * 1024


def output_pipe() -> tuple[int, int]:
    """A large pipe for the output of a command: read end, write end."""
    ours, theirs = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    return ours, theirs


class ReadEnd:
    """The end of a pipe, or the master of a terminal, that this process reads. Owns it."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    async def read(self) -> bytes:
        """Some bytes; empty at the end, which a terminal reports as EIO."""
        while True:
            try:
                return os.read(self._descriptor, _READ_SIZE)
            except BlockingIOError:
                await _ready(self._descriptor, for_writing=False)
            except OSError as error:
                if error.errno == errno.EIO:
                    return b""
                raise

    def close(self) -> None:
        """Close it; nobody may be reading."""
        os.close(self._descriptor)


class WriteEnd:
    """The end of a pipe, or the master of a terminal, that this process writes. Owns it."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`; what nobody reads any more is dropped."""
        view = memoryview(data)
        while view and self._descriptor is not None:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await _ready(self._descriptor, for_writing=True)
            except OSError:
                self.close()

    def close(self) -> None:
        """Close it; closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def _ready(descriptor: int, *, for_writing: bool) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    add = loop.add_writer if for_writing else loop.add_reader
    remove = loop.remove_writer if for_writing else loop.remove_reader
    add(descriptor, event.set)
    try:
        await event.wait()
    finally:
        remove(descriptor)
