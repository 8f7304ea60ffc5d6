"""What a power cut leaves of a device's files.

A phone's file system writes data back some seconds after it was written. What was not written
back when the power goes is lost: under delayed allocation the file is there, and empty.
"""

import contextlib
import os
import time
from pathlib import Path

SYNCED_NAME = "synced"
"""File in the device's `state` whose time is that of the last `sync` on the device."""


def lose_unsynced(data: Path, synced: Path, window_s: float) -> list[str]:
    """Empty every file below `data` changed in the window and since the last `sync`; which.

    Only the device's own `sync` command counts; an fsync(2) by a program cannot be seen.
    """
    oldest_ns = time.time_ns() - int(window_s * 1e9)
    with contextlib.suppress(FileNotFoundError):
        oldest_ns = max(oldest_ns, synced.stat().st_mtime_ns)
    lost: list[str] = []
    for parent, _, names in os.walk(data):
        for name in names:
            path = Path(parent, name)
            try:
                found = path.lstat()
                regular = path.is_file() and not path.is_symlink()
                if regular and found.st_size and found.st_ctime_ns > oldest_ns:
                    os.truncate(path, 0)
                    lost.append(str(path.relative_to(data)))
            except OSError:
                continue
    return lost
