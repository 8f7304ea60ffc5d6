"""Running builds and the entries they use, which must not be removed.

A build holds a lock for as long as it runs and lists the entries that it uses. The lock dies with
its process, however that ends: a list without a held lock is of a build that is over.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from buildlib.cache.layout import BUILDS


class RunningBuild:
    """List of the entries of one build; threads share it."""

    def __init__(self, root: Path) -> None:
        folder = root / BUILDS
        folder.mkdir(parents=True, exist_ok=True)
        name = secrets.token_hex(8)
        self._lock = FileLock(folder / f"{name}.lock", thread_local=False)
        self._lock.acquire()
        self._path = folder / f"{name}.used"
        self._writing = threading.Lock()
        self._list = self._path.open("a", encoding="utf-8")

    def mark_used(self, model: str, entry: str) -> None:
        """Add an entry to the list. The caller holds the lock of the entry."""
        with self._writing:
            self._list.write(json.dumps(f"{model}/{entry}") + "\n")  # a name may hold line ends
            self._list.flush()

    def close(self) -> None:
        """Delete the list when the build ends."""
        with contextlib.suppress(OSError):  # a full disk; the list is not needed any more
            self._list.close()
        self._path.unlink(missing_ok=True)
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release(force=True)


def entries_in_use(root: Path) -> set[str]:
    """Return `<model>/<entry>` of all running builds; delete the lists of ended builds."""
    entries: set[str] = set()
    folder = root / BUILDS
    for path in sorted(folder.glob("*.lock")) if folder.is_dir() else []:
        list_file = path.with_suffix(".used")
        try:
            with FileLock(path, timeout=0, thread_local=False):
                list_file.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        except Timeout:
            with contextlib.suppress(FileNotFoundError):
                entries.update(_entries_of(list_file))
    return entries


def _entries_of(list_file: Path) -> Iterator[str]:
    """Read the entries of a list, without a line that is still being written."""
    for line in list_file.read_text(encoding="utf-8").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            yield str(json.loads(line))
