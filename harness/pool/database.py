"""SQLite file of the ledger: schema, migrations, transactions and errors."""

import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from harness.errors import DamagedLedgerError, LedgerError, NewerLedgerError
from harness.pool.ledger_file import prepare

FORMAT = 7
_APPLICATION_ID = 0x716E6670
_BUSY_S = 30.0
_RETRY_S = 0.01
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_LEAST_SPACE = 1 << 16
"""Free bytes below which a file of SQLite cannot grow."""

_TABLES = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
INSERT INTO counters VALUES ('token', 0), ('facts', 0);
CREATE TABLE devices (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, spec TEXT NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, since REAL NOT NULL,
    leases INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0,
    fence TEXT NOT NULL DEFAULT '', root TEXT NOT NULL DEFAULT '',
    quiet INTEGER NOT NULL DEFAULT 0,
    step TEXT NOT NULL DEFAULT '', probed INTEGER NOT NULL DEFAULT 1,
    good INTEGER NOT NULL DEFAULT 0,
    soc TEXT NOT NULL DEFAULT '', hexagon TEXT NOT NULL DEFAULT '', free_bytes INTEGER
) STRICT;
CREATE TABLE addresses (spec TEXT PRIMARY KEY, key TEXT NOT NULL) STRICT;
CREATE TABLE leases (
    key TEXT PRIMARY KEY, token INTEGER NOT NULL, purpose TEXT NOT NULL, granted REAL NOT NULL,
    failure TEXT NOT NULL DEFAULT '',
    host TEXT NOT NULL, boot TEXT NOT NULL, pid INTEGER NOT NULL, started INTEGER NOT NULL,
    namespace TEXT NOT NULL, label TEXT NOT NULL, beat REAL NOT NULL, ttl REAL NOT NULL
) STRICT;
CREATE TABLE tickets (
    id INTEGER PRIMARY KEY AUTOINCREMENT, candidates TEXT NOT NULL, count INTEGER NOT NULL,
    token INTEGER,
    host TEXT NOT NULL, boot TEXT NOT NULL, pid INTEGER NOT NULL, started INTEGER NOT NULL,
    namespace TEXT NOT NULL, label TEXT NOT NULL, beat REAL NOT NULL, ttl REAL NOT NULL
) STRICT;
CREATE TABLE evidence (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, at REAL NOT NULL, lease INTEGER NOT NULL,
    kind TEXT NOT NULL, weight REAL NOT NULL, text TEXT NOT NULL,
    settled INTEGER NOT NULL DEFAULT 0,
    work TEXT NOT NULL DEFAULT '', excuse TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX evidence_by_key ON evidence (key, lease);
CREATE INDEX evidence_by_work ON evidence (work);
CREATE TABLE history (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, at REAL NOT NULL, what TEXT NOT NULL,
    text TEXT NOT NULL, token INTEGER
) STRICT;
CREATE INDEX history_by_key ON history (key, id);
CREATE TABLE totals (
    key TEXT NOT NULL, period TEXT NOT NULL, what TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (key, period, what)
) STRICT;
"""

_MIGRATIONS: MappingProxyType[int, str] = MappingProxyType(
    {
        1: """
        ALTER TABLE devices ADD COLUMN root TEXT NOT NULL DEFAULT '';
        ALTER TABLE devices ADD COLUMN quiet INTEGER NOT NULL DEFAULT 0;
        INSERT INTO counters VALUES ('facts', 0);
        """,
        2: """
        ALTER TABLE devices ADD COLUMN step TEXT NOT NULL DEFAULT '';
        """,
        3: """
        ALTER TABLE devices ADD COLUMN probed INTEGER NOT NULL DEFAULT 1;
        UPDATE devices SET probed = 0 WHERE reason = 'not looked at yet';
        ALTER TABLE history ADD COLUMN token INTEGER;
        UPDATE history SET token = CAST(substr(text, 7) AS INTEGER),
            text = substr(text, instr(text, ': ') + 2)
            WHERE what = 'lost its lease' AND text GLOB 'token [0-9]*: *';
        """,
        4: """
        CREATE TABLE totals (
            key TEXT NOT NULL, period TEXT NOT NULL, what TEXT NOT NULL, count INTEGER NOT NULL,
            PRIMARY KEY (key, period, what)
        ) STRICT;
        """,
        5: """
        ALTER TABLE devices ADD COLUMN good INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE evidence ADD COLUMN work TEXT NOT NULL DEFAULT '';
        ALTER TABLE evidence ADD COLUMN excuse TEXT NOT NULL DEFAULT '';
        CREATE INDEX evidence_by_work ON evidence (work);
        """,
        6: """
        ALTER TABLE leases ADD COLUMN host TEXT NOT NULL DEFAULT '';
        ALTER TABLE tickets ADD COLUMN host TEXT NOT NULL DEFAULT '';
        """,
    }
)
"""Statements that bring a file from a format to the next one."""


class Database:
    """Connection that the threads of this process share for short transactions, one at a time.

    A forked child opens its own connection. Everything raises `LedgerError` when the file cannot be
    used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._pid = 0
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the file; its next use opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """Begin a transaction that alone may write; all of it happens, or nothing."""
        return self._transaction("BEGIN IMMEDIATE")

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Begin a transaction that reads one consistent view."""
        return self._transaction("BEGIN")

    def version(self) -> int:
        """Return a number that changes when another process has changed the ledger."""
        with self._lock, self._typed_errors():
            return int(self._open().execute("PRAGMA data_version").fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._typed_errors():
            connection = self._open()
            try:  # includes BEGIN: Ctrl-C may come right after it
                connection.execute(begin)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        prepare(self.path)
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.row_factory = sqlite3.Row
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # A file that is not our ledger is left as it is.
        application, version, tables = _identity(connection)
        if application != _APPLICATION_ID and (application or version or tables):
            raise DamagedLedgerError(str(self.path), "it is some other database")
        if version > FORMAT:
            raise NewerLedgerError(str(self.path), version)
        _use_wal(connection)
        # A power cut may lose the last transactions: leases, which it ends anyway.
        connection.execute("PRAGMA synchronous = NORMAL")
        if version < FORMAT:
            self._migrate(connection)

    def _migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            scripts = (
                [_MIGRATIONS[number] for number in range(version, FORMAT)] if version else [_TABLES]
            )
            if version < FORMAT:
                for statement in filter(str.strip, "".join(scripts).split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if _is_full_disk(self.path.parent, error):
                reason = f"no space is left on the disk of {self.path.parent}: free some there"
            raise LedgerError(str(self.path), reason) from None
        except (sqlite3.DatabaseError, ValueError) as error:  # or a value that means nothing
            raise DamagedLedgerError(str(self.path), str(error)) from None


def _is_full_disk(folder: Path, error: sqlite3.OperationalError | OSError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in _NO_SPACE:
        return True
    if code not in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}:
        return False
    try:  # for some files, SQLite does not tell a full disk from a broken one
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_SPACE or not disk.f_favail


def _identity(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Return application id, version and number of tables, read in one transaction.

    Read one by one while another process creates the file, they would look like a foreign database.
    """
    connection.execute("BEGIN")
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    finally:
        with contextlib.suppress(sqlite3.Error):  # a full disk ended it; the first error says so
            connection.execute("ROLLBACK")
    return application, version, tables


def _use_wal(connection: sqlite3.Connection) -> None:
    """Change to WAL mode; if several processes do so at once, SQLite refuses all but one."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return
