"""Contents of a device's `/data`: its size limit, and losses in a power cut.

The limit is enforced where files arrive by the sync protocol. Shell commands only get a limit on
the size of each file, the free space when they started, so a command that writes many files can
exceed the limit; a later push then fails.

A phone's file system writes data back some seconds after it was written. Data not yet written
back is lost in a power cut: under delayed allocation the file exists, and is empty.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

_BLOCK = 4096
_RECOUNT_AFTER_S = 2.0

SYNCED_NAME = "synced"
"""File in the device's `state` with the time of its boot, or of the last `sync` since."""
SYNCED_FILES_NAME = "synced_files"
"""File in which `sync FILE` notes inode, mtime in ns and size of each file."""


class Storage:
    """Disk usage of `/data` against a limit.

    Walking the folder is slow, so a count is used for two seconds, and bytes that arrive meanwhile
    are added to it. One object serves all pushes of a device.

    Args:
        on_full: called when a write is refused.

    Attributes:
        limit_bytes: current limit; `None` for none.
    """

    def __init__(self, data: Path, limit_bytes: int | None, on_full: Callable[[], None]) -> None:
        self._data = data
        self._configured_limit = limit_bytes
        self.limit_bytes = limit_bytes
        self._on_full = on_full
        self._counted = 0
        self._counted_at = float("-inf")

    def free_bytes(self) -> int | None:
        """Return the free space; `None` without a limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self._usage())

    def limit_free(self, free: int | None) -> None:
        """Limit the free space from now on; `None` restores the device's own limit."""
        limits = [] if self._configured_limit is None else [self._configured_limit]
        if free is not None:
            limits.append(used_bytes(self._data) + free)
        self.limit_bytes = min(limits, default=None)

    def claim(self, count: int) -> None:
        """Account for `count` bytes about to be written."""
        if self.limit_bytes is None:
            return
        if self._usage() + count > self.limit_bytes:
            self.invalidate()  # files may have gone meanwhile
        if self._usage() + count > self.limit_bytes:
            self._on_full()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._counted += count

    def invalidate(self) -> None:
        """Count again next time, because files were deleted."""
        self._counted_at = float("-inf")

    def _usage(self) -> int:
        now = time.monotonic()
        if now - self._counted_at > _RECOUNT_AFTER_S:
            self._counted = used_bytes(self._data)
            self._counted_at = now
        return self._counted


def used_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, in whole blocks, hard links counted once."""
    total = 0
    links: set[tuple[int, int]] = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 - millions of these
            except OSError:
                continue
            if status.st_nlink > 1:
                if (status.st_dev, status.st_ino) in links:
                    continue
                links.add((status.st_dev, status.st_ino))
            total += -(-status.st_size // _BLOCK) * _BLOCK
    return total


def truncate_unsynced(data: Path, state: Path, window_s: float) -> list[str]:
    """Empty the files below `data` that changed in the window and were not synced; return them.

    An fsync(2) by a program cannot be seen. A file that was renamed or linked counts as changed,
    unless `sync FILE` was given its contents.
    """
    oldest_ns = time.time_ns() - int(window_s * 1e9)
    with contextlib.suppress(FileNotFoundError):
        oldest_ns = max(oldest_ns, (state / SYNCED_NAME).stat().st_mtime_ns)
    synced = _synced_files(state)
    lost: list[str] = []
    for parent, _, names in os.walk(data):
        for name in names:
            path = Path(parent, name)
            try:
                status = path.lstat()
                regular = path.is_file() and not path.is_symlink()
                if not regular or not status.st_size or status.st_ctime_ns <= oldest_ns:
                    continue
                if f"{status.st_ino} {status.st_mtime_ns} {status.st_size}" not in synced:
                    os.truncate(path, 0)
                    lost.append(str(path.relative_to(data)))
            except OSError:
                continue
    return lost


def _synced_files(state: Path) -> frozenset[str]:
    try:
        return frozenset((state / SYNCED_FILES_NAME).read_text(errors="replace").splitlines())
    except OSError:
        return frozenset()
