"""File transfer: pushes and pulls over a device's file system, and the host's side of them."""

import errno
import os
import posixpath
import secrets
import stat as stat_bits
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from buildlib.files import atomic_write
from harness.devices.base import Progress, PushItem
from harness.errors import DeviceFullError, DeviceTransferError, HostFileError


def stat_local(path: Path) -> os.stat_result:
    """Return the stat of a regular file; raises `HostFileError` for anything else."""
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise HostFileError(str(path), _reason(error)) from None
    if not stat_bits.S_ISREG(stat.st_mode):
        raise HostFileError(str(path), "it is not a regular file")
    return stat


def open_local(path: Path) -> BinaryIO:
    """Open a file to read, unbuffered."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise HostFileError(str(path), _reason(error)) from None


@contextmanager
def receiving(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that appears under its name only at the end, and never by a link elsewhere.

    Args:
        sync: whether its content is on the disk then.
    """
    try:
        with atomic_write(path, sync=sync) as sink:
            yield sink
    except (OSError, ValueError) as error:
        raise HostFileError(str(path), _reason(error)) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


CHUNK = 128 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_NAME = 40


class Files(Protocol):
    """A device's file system, within one deadline.

    All methods raise `OSError` with the device's reason (without `errno` where it gives none), and
    bare `StreamClosed` and `DeadlineExceeded`.
    """

    def check(self) -> None:
        """Raise `StreamClosed` when an `OSError` was no answer, but the connection's end."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, as far as they are missing."""
        ...

    def write(self, path: str, pieces: Iterator[bytes]) -> None:
        """Make a new file; that there is one of that name is an error."""
        ...

    def read(self, path: str, sink: BinaryIO, on_progress: Progress | None) -> int:
        """Hand the contents of a regular file to `sink`; gives their size."""
        ...

    def size(self, path: str) -> int | None:
        """Return the size of a regular file; `None` if there is none."""
        ...

    def settle(self, temporary: str, path: str, mode: int, mtime: int) -> None:
        """Give a file its permissions and time, and then its name, which may be taken."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...


class Transfer:
    """Files to and from one device within one deadline.

    Every file is written under another name, checked, and only then given its own.
    """

    def __init__(self, serial: str, files: Files, free: Callable[[str], int | None]) -> None:
        """`free` tells how much may still be written in a folder."""
        self._serial = serial
        self._files = files
        self._free = free
        self._folders: set[str] = set()

    def put(self, item: PushItem, mtime: int, on_progress: Progress | None) -> int:
        """Send a file; gives its size."""
        folder, name = posixpath.split(item.remote)
        suffix = f".{name[:_LONGEST_NAME]}.{secrets.token_hex(6)}.part"
        temporary = posixpath.join(folder, suffix)
        counter = _Counted(item.local, on_progress)
        with open_local(item.local) as source, self._typed(item.remote, counter):
            _refuse_nul(item.remote)
            if folder and folder not in self._folders:
                self._files.make_folder(folder)
                self._folders.add(folder)
            try:
                self._files.write(temporary, counter.pieces(source))
                if self._files.size(temporary) != counter.total:
                    raise OSError(f"fewer than the {counter.total} bytes sent arrived")
                self._files.settle(temporary, item.remote, item.mode, mtime)
            except BaseException:
                self._remove(temporary)
                raise
        return counter.total

    def get(self, remote: str, sink: BinaryIO, on_progress: Progress | None) -> int:
        """Fetch a file; gives its size."""
        with self._typed(remote, None):
            _refuse_nul(remote)
            return self._files.read(remote, sink, on_progress)

    def _remove(self, path: str) -> None:
        with suppress(Exception):  # what made us remove it is what matters
            self._files.remove(path)

    @contextmanager
    def _typed(self, path: str, sent: "_Counted | None") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._files.check()
            raise self._error(path, error, sent) from None

    def _error(
        self, path: str, error: OSError, sent: "_Counted | None"
    ) -> DeviceTransferError | DeviceFullError:
        reason = error.strerror or str(error)
        if sent is not None and error.errno in (None, *_FULL):
            size = sent.path.stat().st_size
            free = self._free(posixpath.dirname(path))
            if error.errno is not None or (free is not None and free < max(size, CHUNK)):
                return DeviceFullError(self._serial, path, size, free)
        return DeviceTransferError(self._serial, path, reason)


class _Counted:
    """The pieces of a local file, counted as they are asked for."""

    def __init__(self, path: Path, on_progress: Progress | None) -> None:
        self.path = path
        self.total = 0
        self._on_progress = on_progress

    def pieces(self, source: BinaryIO) -> Iterator[bytes]:
        while piece := self._read(source):
            yield piece
            self.total += len(piece)
            if self._on_progress:
                self._on_progress(len(piece))

    def _read(self, source: BinaryIO) -> bytes:
        try:
            return source.read(CHUNK)
        except OSError as error:
            raise HostFileError(str(self.path), error.strerror or str(error)) from None


def _refuse_nul(path: str) -> None:
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL")
