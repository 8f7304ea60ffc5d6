"""Folders of the project's state, and names of files in them.

`buildlib.paths` has the folder of the cache.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

if TYPE_CHECKING:
    from filelock import BaseFileLock


def state_dir() -> Path:
    """Return the folder of this user's own state: ledger, virtual devices, logs of plans.

    `QNNFARM_STATE_DIR` overrides it.
    """
    return Path(os.environ.get("QNNFARM_STATE_DIR") or platformdirs.user_state_dir("qnnfarm"))


def make_state_dir() -> Path:
    """Return the same folder, which exists and which only this user may enter if it is new."""
    folder = state_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def private_lock(path: Path, timeout_s: float = -1) -> "BaseFileLock":
    """Return the lock of a file that only this user may open, since readers of a file may lock it.

    Args:
        timeout_s: how long to wait for it; -1 waits without limit.
    """
    from filelock import FileLock

    with suppress(OSError):  # it is new, or made with another mode by an earlier version
        path.chmod(0o600)
    return FileLock(path, timeout=timeout_s, mode=0o600)


def safe_file_name(text: str) -> str:
    """Return a text as the name of a file: at most 80 letters, digits, `.`, `-` and `_`."""
    name = "".join(c if c.isalnum() or c in ".-_" else "_" for c in text)[:80]
    return name if name.strip(".") else "_"
