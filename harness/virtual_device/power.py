"""What a power cut leaves of a device's files.

A phone's file system writes data back some seconds after it was written. What was not written
back when the power goes is lost: under delayed allocation the file is there, and empty.
"""

import contextlib
import os
import time
from pathlib import Path

SYNCED_NAME = "synced"
"""File in the device's `state` whose time is that of its boot, or of the last `sync` since."""
SYNCED_FILES_NAME = "synced_files"
"""File there in which `sync FILE` notes inode, mtime in ns and size of what it was given."""


def lose_unsynced(data: Path, state: Path, window_s: float) -> list[str]:
    """Empty every file below `data` changed in the window and not synced since; which.

    Whoever changed them, and however: an fsync(2) by a program cannot be seen. A file that was
    renamed or linked counts as changed, unless `sync FILE` was told of its contents.
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
                found = path.lstat()
                regular = path.is_file() and not path.is_symlink()
                if not regular or not found.st_size or found.st_ctime_ns <= oldest_ns:
                    continue
                if f"{found.st_ino} {found.st_mtime_ns} {found.st_size}" not in synced:
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
