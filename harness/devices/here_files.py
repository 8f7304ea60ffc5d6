"""The file system of this machine, seen as a device's."""

import errno
import os
import stat as stat_bits
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.clock import Deadline
from harness.devices.base import Progress
from harness.devices.remote_files import CHUNK


class HereFiles:
    """Implements `harness.devices.remote_files.Files`."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def check(self) -> None:
        """See `Files`."""

    def make_folder(self, path: str) -> None:
        """See `Files`."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, pieces: Iterator[bytes]) -> None:
        """See `Files`."""
        with Path(path).open("xb") as file:
            for piece in pieces:
                self._deadline.remaining()
                file.write(piece)

    def read(self, path: str, sink: BinaryIO, on_progress: Progress | None) -> int:
        """See `Files`."""
        total = 0
        # A pipe would have us wait for a writer, without this flag.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            if not stat_bits.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            while piece := file.read(CHUNK):
                self._deadline.remaining()
                sink.write(piece)
                total += len(piece)
                if on_progress:
                    on_progress(len(piece))
        return total

    def size(self, path: str) -> int | None:
        """See `Files`."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        return found.st_size if stat_bits.S_ISREG(found.st_mode) else None

    def settle(self, temporary: str, path: str, mode: int, mtime: int) -> None:
        """See `Files`."""
        file = Path(temporary)
        file.chmod(mode)
        os.utime(file, (mtime, mtime))
        file.replace(path)

    def remove(self, path: str) -> None:
        """See `Files`."""
        Path(path).unlink()
