"""SHA-256 of this host's files, computed once for as long as a file stays as it is.

The memo is a SQLite file in the cache folder: several processes may use it, and when it is
damaged or cannot be written, files are merely hashed again.
"""

import contextlib
import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HostFileError
from harness.paths import cache_dir

_BUSY_TIMEOUT_S = 5.0
_SETTLED_S = 1.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS hashes_v1 (
    path BLOB PRIMARY KEY,
    identity TEXT NOT NULL,
    sha256 TEXT NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Content and size of a file in bytes."""

    sha256: str
    size: int


def hash_files(paths: Iterable[Path], memo: Path | None = None) -> dict[Path, FileDigest]:
    """The digests of `paths`, from the memo where the file is what it was.

    Raises:
        HostFileError: a file is missing, unreadable or not regular, or changed meanwhile.
    """
    with _open_memo(memo or cache_dir() / "hashes.sqlite") as database:
        return {path: _digest(path, database) for path in paths}


def _digest(path: Path, database: sqlite3.Connection | None) -> FileDigest:
    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            raise HostFileError(str(path), "it is no regular file")
        identity = _identity(before)
        key = os.fsencode(path.absolute())
        known = _recall(database, key, identity)
        if known:
            return FileDigest(known, before.st_size)
        with path.open("rb", buffering=0) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if _identity(path.stat()) != identity:
            raise HostFileError(str(path), "it changed while it was read")
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from None
    # A file written just now may be written again within one tick of the file system's clock.
    if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_S:
        _remember(database, key, identity, sha256)
    return FileDigest(sha256, before.st_size)


def _identity(status: os.stat_result) -> str:
    # st_ctime_ns is in it because, unlike the mtime, no program can set it back.
    return (
        f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} "
        f"{status.st_ino} {status.st_dev}"
    )


@contextlib.contextmanager
def _open_memo(path: Path) -> Iterator[sqlite3.Connection | None]:
    database = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            database = _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            path.unlink(missing_ok=True)  # damaged, and nothing is lost with it
            database = _connect(path)
    except (sqlite3.Error, OSError):
        database = None
    try:
        yield database
    finally:
        if database is not None:
            database.close()


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(_SCHEMA)
    except BaseException:
        database.close()
        raise
    return database


def _recall(database: sqlite3.Connection | None, key: bytes, identity: str) -> str | None:
    if database is None:
        return None
    with contextlib.suppress(sqlite3.Error):
        query = "SELECT sha256 FROM hashes_v1 WHERE path = ? AND identity = ?"
        row = database.execute(query, (key, identity)).fetchone()
        return str(row[0]) if row else None
    return None


def _remember(database: sqlite3.Connection | None, key: bytes, identity: str, sha256: str) -> None:
    if database is None:
        return
    with contextlib.suppress(sqlite3.Error):
        database.execute(
            "INSERT OR REPLACE INTO hashes_v1 VALUES (?, ?, ?)", (key, identity, sha256)
        )
