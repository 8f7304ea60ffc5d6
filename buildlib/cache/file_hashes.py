"""SHA-256 of files, computed once until a file changes.

A file is identified by its inode, so all hard links share one hash, and counts as unchanged while
size, mtime and ctime are. No program can set the ctime back, so every write shows.
Making or removing a hard link changes the ctime as well, though: where the number of links changed
with it, and size and mtime did not, blocks spread over the file decide.
"""

import contextlib
import hashlib
import os
import sqlite3
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from buildlib.closeable import Closeable
from buildlib.errors import InputFileError
from buildlib.paths import default_cache_root

MEMO_FILE = "hashes.sqlite"
_SETTLED_S = 1.0
_PROBES = 64
_PROBE_BYTES = 4096
_WORTH_PROBING = 1 << 20
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
class FileDigest:
    """Content and size of a file in bytes."""

    sha256: str
    size: int


def hash_files(paths: Iterable[Path], memo: Path | None = None) -> dict[Path, FileDigest]:
    """Return the digests of `paths`, from the memo for unchanged files.

    Args:
        paths: read in parallel, one file per processor.
        memo: the memo's file; by default the one in the cache root.

    Raises:
        InputFileError: a file is missing, unreadable or not regular, or changed meanwhile.
    """
    paths = list(dict.fromkeys(paths))
    with HashMemo.at(memo) as hashes, ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(paths, pool.map(hashes.digest, paths), strict=True))


class _Row(NamedTuple):
    """State of a file when it was hashed; `probe` is the hash of a few of its blocks."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    links: int
    sha256: str
    probe: str


class HashMemo(Closeable):
    """Known hashes, in a SQLite file that processes and threads share.

    Threads share one connection. Nothing in the file is needed, so none of its failures is an
    error: files are hashed again.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = _open(path)
        self._guard = threading.Lock()
        self._reading: dict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)

    @classmethod
    def at(cls, path: Path | None) -> "HashMemo":
        """Open the memo in a file; by default the one in the cache root."""
        return cls(path or default_cache_root() / MEMO_FILE)

    def close(self) -> None:
        """Close the file; later hashes are not remembered."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    def digest(self, path: Path, *, reread: bool = False) -> FileDigest:
        """Return the digest of a file, which is read only if it is unknown or `reread`."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
                raise InputFileError(str(path), "it is not a regular file")
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                with self._guard:
                    reading = self._reading[status.st_dev, status.st_ino]
                with reading:  # threads that want the same file wait and find it known
                    return self._digest(file, path, reread=reread)
        except OSError as error:
            raise InputFileError(str(path), error.strerror or str(error)) from None

    def remember(self, path: Path, sha256: str) -> None:
        """Trust the writer of a new file that nobody else could write to."""
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_nlink == 1:
                self._put(status, sha256, _probe(file, status.st_size))

    def _digest(self, file: FileIO, path: Path, *, reread: bool) -> FileDigest:
        before = os.fstat(file.fileno())
        sha256 = None if reread else self._recall(file, before)
        if sha256:
            return FileDigest(sha256, before.st_size)
        began = time.time()
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputFileError(str(path), "it changed while it was read")
        # A file written just now may be written again within one tick of the file system's clock.
        if began - max(before.st_mtime, before.st_ctime) > _SETTLED_S and _same(before, after):
            self._put(before, sha256, _probe(file, before.st_size))
        return FileDigest(sha256, before.st_size)

    def _recall(self, file: FileIO, status: os.stat_result) -> str | None:
        row = self._get(status)
        if row is None or (row.size, row.mtime_ns) != (status.st_size, status.st_mtime_ns):
            return None
        if row.ctime_ns == status.st_ctime_ns:
            return row.sha256
        relinked = bool(row.probe) and row.links != status.st_nlink
        if not relinked or _probe(file, status.st_size) != row.probe:
            return None
        if _same(status, os.fstat(file.fileno())):
            self._put(status, row.sha256, row.probe)
        return row.sha256

    def _get(self, status: os.stat_result) -> _Row | None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                query = "SELECT * FROM hashes_v2 WHERE device = ? AND inode = ?"
                key = (_signed(status.st_dev), _signed(status.st_ino))
                row = self._database.execute(query, key).fetchone()
                return _Row(*row) if row else None
        return None

    def _put(self, status: os.stat_result, sha256: str, probe: str) -> None:
        row = _Row(
            _signed(status.st_dev),
            _signed(status.st_ino),
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_nlink,
            sha256,
            probe,
        )
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                marks = ", ".join("?" * len(row))
                query = f"INSERT OR REPLACE INTO hashes_v2 VALUES ({marks})"  # noqa: S608 - marks
                self._database.execute(query, row)


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("st_size", "st_mtime_ns", "st_ctime_ns")
    )


def _probe(file: FileIO, size: int) -> str:
    """Hash blocks spread evenly over a large file, from the first bytes to the last."""
    if size < _WORTH_PROBING:
        return ""
    digest = hashlib.sha256()
    last = size - _PROBE_BYTES
    for number in range(_PROBES):
        block = os.pread(file.fileno(), _PROBE_BYTES, last * number // (_PROBES - 1))
        digest.update(block)
    return digest.hexdigest()


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
    """Return a number as SQLite takes it, up to 2^63; some file systems number inodes beyond."""
    return number - (1 << 64) if number >= 1 << 63 else number
