"""Folders of the project's state, and names of files in them.

`buildlib.paths` has the folder of the cache.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

if TYPE_CHECKING:
    from filelock import BaseFileLock

SYSTEM_LEDGER_DIR = Path("/var/lib/qnnfarm")
"""Folder with the ledger of all users of the host, if it exists."""


def state_dir() -> Path:
    """Return the folder of this user's own state: virtual devices, plans' journals.

    `QNNFARM_STATE_DIR` overrides it, unless other users share that folder.
    """
    override = os.environ.get("QNNFARM_STATE_DIR")
    if override and not _is_others(Path(override)):
        return Path(override)
    return Path(platformdirs.user_state_dir("qnnfarm"))


def make_state_dir() -> Path:
    """Return the same folder, which exists and which only this user may enter if it is new."""
    folder = state_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def ledger_dir() -> Path:
    """Return the folder of the pools' ledger, which several users may share.

    It is `QNNFARM_STATE_DIR` if that is set, else `/var/lib/qnnfarm` if it exists, else that of
    `state_dir`.
    """
    override = os.environ.get("QNNFARM_STATE_DIR")
    if override:
        return Path(override)
    return SYSTEM_LEDGER_DIR if SYSTEM_LEDGER_DIR.is_dir() else state_dir()


def is_shared(folder: Path) -> bool:
    """Return whether a folder is set up for a group: its files get its group, which may write."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def _is_others(folder: Path) -> bool:
    """Return whether other users share a folder, or one of them has it; root may use any."""
    try:
        owner = folder.stat().st_uid
    except OSError:
        return False
    return is_shared(folder) or os.geteuid() not in {0, owner}


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
