"""Count of the sessions that run at once on this host, from all processes of this user.

Sessions that share a host slow each other down: they share its processors on the emulator, and the
USB hubs on phones. Each holds a locked file in `sessions` beside the pool's ledger. A session that
begins counts the locked files and writes the count into each of them where it is higher, so that
every session ends with the highest count that it was part of. A dead process holds no lock.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.paths import state_dir

_FOLDER = "sessions"
_GATE = ".lock"


class SessionCount:
    """Membership of one session in the count of its host; None once it cannot be counted.

    Args:
        folder: of the locked files; by default beside the pool's ledger.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = state_dir() / _FOLDER if folder is None else folder
        self._file: int | None = None
        self._path: Path | None = None

    @property
    def highest(self) -> int | None:
        """Most sessions at once since this one joined, itself included."""
        return None if self._file is None else _read(self._file)

    def join(self) -> None:
        """Begin to count; a folder that cannot be used means that nothing is known."""
        if self._file is not None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _gate(self._folder):
                path = self._folder / secrets.token_hex(8)
                self._file = _open(path, os.O_CREAT | os.O_EXCL)
                self._path = path
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                others = _live(self._folder, path)
                for file in (self._file, *others):
                    _write(file, max(_read(file) or 0, len(others) + 1))
                for file in others:
                    os.close(file)

    def leave(self) -> None:
        """End the membership."""
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                self._path.unlink()


def _live(folder: Path, own: Path) -> list[int]:
    """Open the files of the other sessions; those of dead processes are removed."""
    files = []
    for path in folder.glob("[0-9a-f]*"):
        if path == own:
            continue
        try:
            file = _open(path)
        except OSError:  # it ended meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            files.append(file)
        else:
            path.unlink(missing_ok=True)
            os.close(file)
    return files


@contextmanager
def _gate(folder: Path) -> Iterator[None]:
    gate = _open(folder / _GATE, os.O_CREAT)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _read(file: int) -> int | None:
    text = os.pread(file, 16, 0).strip()
    return int(text) if text.isdigit() else None


def _write(file: int, count: int) -> None:
    os.pwrite(file, f"{count:<8}".encode(), 0)
