"""The SQLite table of known hashes: nothing in it is needed, so nothing about it is an error."""

import contextlib
import os
import sqlite3
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

_BUSY_TIMEOUT_S = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS hashes_v2 (
    device INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    links INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    probe TEXT NOT NULL,
    PRIMARY KEY (device, inode)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class HashRow:
    """What a file was when it was hashed.

    Attributes:
        probe: hash of a few of its blocks.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    links: int
    sha256: str
    probe: str

    @classmethod
    def of(cls, status: os.stat_result, sha256: str, probe: str) -> "HashRow":
        """The row of a file in a given state."""
        return cls(
            _signed(status.st_dev),
            _signed(status.st_ino),
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_nlink,
            sha256,
            probe,
        )


class HashTable:
    """Rows by inode; threads share one connection."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = _open(path)

    def close(self) -> None:
        """Close the file; the table is empty from then on."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    def get(self, device: int, inode: int) -> HashRow | None:
        """What is known of a file."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                query = "SELECT * FROM hashes_v2 WHERE device = ? AND inode = ?"
                key = (_signed(device), _signed(inode))
                row = self._database.execute(query, key).fetchone()
                return HashRow(*row) if row else None
        return None

    def put(self, row: HashRow) -> None:
        """Replace what is known of a file."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                marks = ", ".join("?" * len(astuple(row)))
                self._database.execute(
                    f"INSERT OR REPLACE INTO hashes_v2 VALUES ({marks})",  # noqa: S608 - marks
                    astuple(row),
                )


def _open(path: Path) -> sqlite3.Connection | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            path.unlink(missing_ok=True)  # damaged, and nothing is lost with it
            return _connect(path)
    except (sqlite3.Error, OSError):
        return None


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(_SCHEMA)
    except BaseException:
        database.close()
        raise
    return database


def _signed(number: int) -> int:
    """SQLite's integers end at 2^63; some file systems number inodes beyond."""
    return number - (1 << 64) if number >= 1 << 63 else number
