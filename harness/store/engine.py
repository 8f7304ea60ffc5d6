"""Connections to the results database, and what its failures mean.

SQLite runs in WAL mode, so that reports read while runs write, and with `synchronous=FULL`: a run
takes minutes and commits a handful of times, so an fsync for each is nothing, and a result is safe
once its write has returned.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import URL, Connection, Engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from harness.errors import (
    MissingStoreError,
    NotAStoreError,
    StoreLockedError,
    StoreUnavailableError,
)

BUSY_TIMEOUT_S = 30.0
_WRITES = "qnnfarm_writes"
_SQLITE_MAGIC = b"SQLite format 3\0"


class Database:
    """One database: hands out read and write transactions."""

    def __init__(self, engine: Engine, location: str, busy_timeout_s: float) -> None:
        self._engine = engine
        self.location = location
        self._busy_timeout_s = busy_timeout_s

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction that sees one state of the database throughout."""
        with translated(self.location, self._busy_timeout_s), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction: all of it is kept, or nothing.

        It takes the write lock at once. A transaction that reads first and writes later could not
        wait for another writer: SQLite fails it instead.
        """
        with (
            translated(self.location, self._busy_timeout_s),
            self._engine.execution_options(**{_WRITES: True}).begin() as connection,
        ):
            yield connection

    def use_wal(self) -> None:
        """Switch a SQLite file to WAL for good; to be called once the file is known to be ours."""
        if self._engine.dialect.name == "sqlite":
            with translated(self.location, self._busy_timeout_s):
                connection = self._engine.raw_connection()
                try:
                    _enter_wal(connection.cursor(), self._busy_timeout_s)
                finally:
                    connection.close()

    def close(self) -> None:
        """Give up all connections."""
        self._engine.dispose()


def open_database(
    location: str | Path, *, create: bool, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> Database:
    """Open a SQLite file by its path, or any database by its SQLAlchemy URL.

    Raises:
        MissingStoreError: there is no such file, and `create` is off.
        NotAStoreError: the file is no database.
        StoreUnavailableError: the URL, its driver, the folder or the server cannot be used.
    """
    text = str(location)
    if "://" in text and not text.startswith("sqlite"):
        return _open_server(text, busy_timeout_s)
    path = Path(text.removeprefix("sqlite:///")) if "://" in text else Path(text)
    return _open_sqlite(path, create=create, busy_timeout_s=busy_timeout_s)


def _open_server(text: str, busy_timeout_s: float) -> Database:
    try:
        url: URL = make_url(text)
        engine = sqlalchemy.create_engine(url, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        scheme = text.partition("://")[0]
        raise StoreUnavailableError(f"{scheme}://…", _first_line(error)) from error
    # A URL's query may hold a password as well, so that none of it is shown.
    shown = url.set(query={}).render_as_string(hide_password=True)
    return Database(engine, shown, busy_timeout_s)


def _open_sqlite(path: Path, *, create: bool, busy_timeout_s: float) -> Database:
    _check_file(path, create=create)
    target = path.absolute()

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            _sqlite_uri(target, create=create),
            uri=True,
            timeout=busy_timeout_s,
            isolation_level=None,  # transactions are begun by `_begin`, not by the driver's guesses
            check_same_thread=False,
        )

    engine = sqlalchemy.create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        if not create:
            connection.execute("PRAGMA query_only = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return Database(engine, str(path), busy_timeout_s)


def _check_file(path: Path, *, create: bool) -> None:
    try:
        if path.is_dir():
            raise NotAStoreError(str(path), "it is a folder")
        if not path.exists():
            if not create:
                raise MissingStoreError(str(path))
            if not path.absolute().parent.is_dir():
                raise StoreUnavailableError(str(path), "its folder does not exist")
            return
        with path.open("rb") as file:
            start = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise StoreUnavailableError(str(path), error.strerror or str(error)) from error
    if start and start != _SQLITE_MAGIC:
        raise NotAStoreError(str(path), "it is no SQLite file")


def _sqlite_uri(path: Path, *, create: bool) -> str:
    """The file as SQLite's URI.

    `immutable` where the folder is read-only: readers of a WAL database could not coordinate there.
    """
    uri = f"file:{quote(os.fsencode(path))}"
    if create:
        return f"{uri}?mode=rwc"
    if not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        return f"{uri}?mode=ro&immutable=1"
    return f"{uri}?mode=rw"  # not `ro`: the last reader to leave would not clear up the WAL


def _enter_wal(cursor: DBAPICursor, patience_s: float) -> None:
    """Switch to WAL; SQLite does not wait for others by itself here, so this does."""
    deadline = time.monotonic() + patience_s
    while _journal_mode(cursor) != "wal":
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _journal_mode(cursor: DBAPICursor) -> str:
    cursor.execute("PRAGMA journal_mode")
    row = cursor.fetchone()
    return str(row[0]) if row else ""


@contextmanager
def translated(location: str, busy_timeout_s: float) -> Iterator[None]:
    """Turn the database's failures into errors that say what to do."""
    try:
        yield
    except (sqlite3.Error, SQLAlchemyError) as error:
        cause = (error.orig or error) if isinstance(error, DBAPIError) else error
        text = _first_line(cause)
        if "is locked" in text:
            raise StoreLockedError(location, busy_timeout_s) from error
        if "not a database" in text or "malformed" in text:
            raise NotAStoreError(location, text) from error
        raise StoreUnavailableError(location, text) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
