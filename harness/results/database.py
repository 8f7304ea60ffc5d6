"""Connections to the results database, and the translation of its errors.

SQLite runs in WAL mode, so that reports read while runs write, and with `synchronous=FULL`: a run
takes minutes and commits a handful of times, so an fsync for each is nothing, and a result is safe
once its write has returned. For the same reason every transaction has a connection of its own:
nothing idles, and a server may restart in between.

psycopg is imported when a database on a server is opened, not before: results in files need no
driver.
"""

import errno
import functools
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import URL, Connection, Engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor, Dialect
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from harness.errors import (
    MissingStoreError,
    RunConflictError,
    StoreLostError,
    StoreUnavailableError,
)

T = TypeVar("T")
BUSY_TIMEOUT_S = 30.0
"""Patience with other writers, and with a server that restarts."""
_RETRY_S = 0.2
_KEPT_TEXTS = 1024
"""JSON texts that are read once: nearly all runs of a history have the same versions and clocks."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_LEAST_SPACE = 1 << 16
"""Free bytes below which a file of SQLite cannot grow."""
_SQLITE_MAGIC = b"SQLite format 3\0"

WRITES = "qnnfarm_writes"
"""Execution option of transactions that write."""
LOCK_NOT_AVAILABLE = "55P03"
_DEADLOCK = "40P01"
"""Error of a transaction that the server ended, as it and another waited for each other."""
_AWAY = frozenset(["57P01", "57P02", "57P03"])
"""Errors of a server that shuts down, has crashed, or is starting up."""

_DRIVER = "postgresql+psycopg"
_SCHEMES = frozenset([_DRIVER, "postgresql", "postgres"])
_KEPT = (
    # A result is safe once its write has returned; what is stricter than `on` stays.
    "SELECT set_config('synchronous_commit', 'on', true) "
    "WHERE current_setting('synchronous_commit') = 'off'"
)
_GONE_S = 120
"""A client that is silent within a transaction for this long has lost its power or network."""
_CONNECTING: Mapping[str, object] = MappingProxyType(
    {
        "connect_timeout": 30,
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 60_000,
        "fallback_application_name": "qnnfarm",
    }
)
"""libpq's own defaults wait for hours; the URL can override these."""


class ResultsDatabase:
    """One database, with read and write transactions."""

    def __init__(self, engine: Engine, location: str, busy_timeout_s: float) -> None:
        self._engine = engine
        self.location = location
        self._busy_timeout_s = busy_timeout_s
        self._was_there = False

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction that sees one state of the database throughout."""
        with self._begun(self._engine) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction that is kept as a whole or not at all.

        On SQLite it takes the write lock at once: a transaction that reads first and writes later
        could not wait for another writer, SQLite fails it instead. On PostgreSQL it sees others'
        commits before each of its statements, and locks the rows that it depends on.
        """
        with self._begun(self._engine.execution_options(**{WRITES: True})) as connection:
            yield connection

    def insist(self, write: Callable[[Connection], T]) -> T | None:
        """Write in one transaction, and again if the server went away or ended it meanwhile.

        Args:
            write: idempotent, or raises `RunConflictError` when repeated: the server may have kept
                the first one without an answer.

        Returns:
            The value of `write`; None if the first one was kept, and conflicts with the second.

        Raises:
            StoreLostError: the server stayed away for as long as one waits for a lock.
        """
        deadline = time.monotonic() + self._busy_timeout_s
        is_repeated = False
        while True:
            try:
                with self.writing() as connection:
                    return write(connection)
            except StoreLostError:
                if time.monotonic() > deadline:
                    raise
                is_repeated = True
            except RunConflictError:
                if not is_repeated:
                    raise
                return None

    @contextmanager
    def _begun(self, engine: Engine) -> Iterator[Connection]:
        """Begin a transaction; a server that was there before is waited for."""
        deadline = time.monotonic() + self._busy_timeout_s
        with translate_errors(self.location, self._busy_timeout_s), ExitStack() as stack:
            while True:
                try:
                    connection = stack.enter_context(engine.begin())
                except DBAPIError as error:
                    is_away = self._was_there and is_lost(error)
                    if not is_away or time.monotonic() > deadline:
                        raise
                    time.sleep(_RETRY_S)
                else:
                    break
            self._was_there = True
            yield connection

    def use_wal(self) -> None:
        """Switch a SQLite file to WAL for good; to be called once the file is known to be ours."""
        if self.is_file:
            with self.cursor() as cursor:
                enter_wal(cursor, self._busy_timeout_s)

    @property
    def is_file(self) -> bool:
        """True for a SQLite file, False for a server's database."""
        return self._engine.dialect.name == "sqlite"

    @contextmanager
    def cursor(self) -> Iterator[DBAPICursor]:
        """Open a SQLite cursor outside of any transaction, for `PRAGMA` and `VACUUM`."""
        with translate_errors(self.location, self._busy_timeout_s):
            connection = self._engine.raw_connection()
            try:
                with closing(connection.cursor()) as cursor:
                    yield cursor
            finally:
                connection.close()

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep a connection to a SQLite file open, for a process that writes often.

        Else each writer is the last to leave, and clears the WAL up, which takes several fsyncs.
        """
        if not self.is_file:
            yield
            return
        with self.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM sqlite_master")
            cursor.fetchall()
            yield

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


class RollingBack(sqlite3.Connection):
    """A connection that rolls back before it closes.

    SQLAlchemy closes a connection that Ctrl-C cut off without a rollback. `sqlite3_close_v2` waits
    for the last cursor, which the traceback keeps alive, and so the lock would outlive the close.
    """

    def close(self) -> None:
        """Roll back, and close."""
        try:
            with suppress(sqlite3.Error):  # it is closed already
                self.rollback()
        finally:
            super().close()


def open_database(
    location: str | Path, *, create: bool, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> ResultsDatabase:
    """Open a SQLite file by its path, or a PostgreSQL database by its URL.

    Without `create` it is read-only.

    Raises:
        MissingStoreError: there is no such file, and `create` is off.
        StoreUnavailableError: the file is not a database; the URL, its driver, the folder or the
            server cannot be used.
    """
    __tracebackhide__ = True  # pytest would show the location, and so its password
    path = database_file(location)
    if path is None:
        return _open_server(str(location), create=create, busy_timeout_s=busy_timeout_s)
    return _open_sqlite(path, create=create, busy_timeout_s=busy_timeout_s)


def shown(location: str | Path) -> str:
    """Return a location without its password, and without a URL's query, which may hold one."""
    path = database_file(location)
    return shown_url(parse_server_url(str(location))) if path is None else str(path)


def connection_string(location: str) -> str:
    """Return libpq's connection string of a server's database, password and all."""
    __tracebackhide__ = True
    return (
        parse_server_url(location)
        .set(drivername="postgresql")
        .render_as_string(hide_password=False)
    )


def exists(location: str | Path) -> bool:
    """Return whether there is a database to open; for a server, only opening it will tell."""
    path = database_file(location)
    if path is None:
        return True
    _check_file(path, create=True)
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise StoreUnavailableError(str(path), "it cannot be written")
    return path.exists()


def database_file(location: str | Path) -> Path | None:
    """Return the SQLite file of a location; `None` for a database on a server."""
    text = str(location)
    if "://" not in text:
        return Path(text)
    return Path(text.removeprefix("sqlite:///")) if text.startswith("sqlite") else None


def _open_server(text: str, *, create: bool, busy_timeout_s: float) -> ResultsDatabase:
    __tracebackhide__ = True
    url = parse_server_url(text)
    engine = make_server_engine(url, read_only=not create, lock_timeout_s=busy_timeout_s)
    return ResultsDatabase(engine, shown_url(url), busy_timeout_s)


def _open_sqlite(path: Path, *, create: bool, busy_timeout_s: float) -> ResultsDatabase:
    _check_file(path, create=create)
    target = path.absolute()

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            _sqlite_uri(target, create=create),
            uri=True,
            timeout=busy_timeout_s,
            isolation_level=None,  # transactions are begun by the engine, not by guesses
            check_same_thread=False,
            factory=RollingBack,
        )

    engine = make_file_engine(connect)

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        if not create:
            connection.execute("PRAGMA query_only = ON")

    return ResultsDatabase(engine, str(path), busy_timeout_s)


def make_file_engine(connect: Callable[[], sqlite3.Connection]) -> Engine:
    """Create an engine that connects to a SQLite file for each transaction.

    One that writes takes the lock at once.
    """
    engine = sqlalchemy.create_engine(
        "sqlite://",
        creator=connect,
        poolclass=NullPool,
        json_deserializer=functools.lru_cache(_KEPT_TEXTS)(json.loads),
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _check_file(path: Path, *, create: bool) -> None:
    try:
        if path.is_dir():
            raise StoreUnavailableError(str(path), "it is a folder")
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
        raise StoreUnavailableError(str(path), "it is not a SQLite file")


def _sqlite_uri(path: Path, *, create: bool) -> str:
    """Return the file as SQLite's URI.

    `immutable` where the folder is read-only: readers of a WAL database could not coordinate there.
    """
    uri = f"file:{quote(os.fsencode(path))}"
    if create:
        return f"{uri}?mode=rwc"
    if not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        return f"{uri}?mode=ro&immutable=1"
    return f"{uri}?mode=rw"  # not `ro`: the last reader to leave would not clear up the WAL


def enter_wal(cursor: DBAPICursor, patience_s: float) -> None:
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
def refuse_unreadable_rows(location: str) -> Iterator[None]:
    """Raise `StoreUnavailableError` for values that their columns cannot have.

    SQLite keeps any text, be it no JSON or no time. PostgreSQL has times that
    Python has not.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise StoreUnavailableError(location, f"a row cannot be read: {error}") from error
    except DataError as error:
        raise StoreUnavailableError(location, f"a row cannot be read: {error.orig}") from error


@contextmanager
def translate_errors(location: str, busy_timeout_s: float) -> Iterator[None]:
    """Translate errors of the database into ours, with advice."""
    try:
        yield
    except (sqlite3.Error, SQLAlchemyError) as error:
        cause = (error.orig or error) if isinstance(error, DBAPIError) else error
        text = first_line(cause)
        if _is_locked(cause, text):
            raise StoreUnavailableError(
                location,
                f"it stayed locked by another process for {busy_timeout_s:g} s: try again later",
            ) from error
        if isinstance(cause, sqlite3.Error):
            text = full_disk(Path(location).parent, cause) or text
            if _is_damaged(text):
                raise StoreUnavailableError(location, text) from error
        is_ended = getattr(cause, "sqlstate", None) == _DEADLOCK
        if is_ended or (isinstance(error, DBAPIError) and is_lost(error)):
            raise StoreLostError(location, text) from error
        raise StoreUnavailableError(location, text) from error


def _is_locked(cause: BaseException, text: str) -> bool:
    if isinstance(cause, sqlite3.Error):
        return "is locked" in text
    return getattr(cause, "sqlstate", None) == LOCK_NOT_AVAILABLE


def _is_damaged(text: str) -> bool:
    return "not a database" in text or "malformed" in text


def full_disk(folder: Path, error: sqlite3.Error | OSError) -> str:
    """Return that the disk of a SQLite file is full, if that is what its error means, or empty."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in _NO_SPACE
    if code in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}:
        with suppress(
            OSError
        ):  # for some files, SQLite does not tell a full disk from a broken one
            disk = os.statvfs(folder)
            full = disk.f_bavail * disk.f_frsize < _LEAST_SPACE or not disk.f_favail
    return f"no space is left on the disk of {folder}: free some there" if full else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error; at least its name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def parse_server_url(text: str) -> URL:
    """Parse the URL of a database on a PostgreSQL server.

    Raises:
        StoreUnavailableError: it is not a URL, or of another engine or driver. The error shows
            only the scheme, as anything else may be part of a password.
    """
    __tracebackhide__ = True
    scheme = text.partition("://")[0]
    if scheme not in _SCHEMES:
        reason = f"databases are SQLite files, or {_DRIVER}://USER@HOST/DATABASE"
        raise StoreUnavailableError(f"{scheme}://…", reason)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        reason = f"its URL cannot be read: it should be {_DRIVER}://USER@HOST:PORT/DATABASE"
        raise StoreUnavailableError(f"{scheme}://…", reason) from None
    if "@" in f"{url.host}{url.database}":
        reason = "its URL has more than one @: one that is part of the password is written %40"
        raise StoreUnavailableError(f"{scheme}://…", reason)
    password = url.query.get("password", url.password)
    url = url.difference_update_query(["password"])
    return url.set(drivername=_DRIVER, password=password if isinstance(password, str) else None)


def shown_url(url: URL) -> str:
    """Return the URL for display, without password and query, which may hold secrets."""
    return url.set(query={}).render_as_string(hide_password=True)


def make_server_engine(
    url: URL, *, read_only: bool, lock_timeout_s: float, gone_s: int = _GONE_S
) -> Engine:
    """Create an engine that opens a connection for each transaction.

    Args:
        read_only: make transactions that write fail.
        lock_timeout_s: for how long a statement waits for another's lock.
        gone_s: how long a client may be silent within a transaction that writes.
    """
    try:
        # What has no password cannot show it.
        engine = sqlalchemy.create_engine(_told(url), poolclass=NullPool, pool_reset_on_return=None)
    except ImportError as error:
        reason = "PostgreSQL's driver is not installed: pip install 'qnnfarm[postgresql]'"
        raise StoreUnavailableError(shown_url(url), reason) from error

    @event.listens_for(engine, "do_connect")
    def _connect(
        dialect: Dialect,
        _record: ConnectionPoolEntry,
        _arguments: tuple[object, ...],
        _named: dict[str, object],
    ) -> DBAPIConnection:
        return _connected(dialect, url)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES, False) and not read_only
        connection.exec_driver_sql(_beginning(writes, lock_timeout_s, gone_s))

    return engine


def _told(url: URL) -> URL:
    return URL.create(url.drivername, url.username, None, url.host, url.port, url.database)


def is_lost(error: DBAPIError) -> bool:
    """Return whether a server went away, is not ready again, or a connection to it was cut."""
    state = getattr(error.orig, "sqlstate", "none")  # SQLite's errors have none
    if state is None:
        return isinstance(error, OperationalError)
    return error.connection_invalidated or state.startswith("08") or state in _AWAY


def _connected(dialect: Dialect, url: URL) -> DBAPIConnection:
    arguments, options = dialect.create_connect_args(url)
    try:
        return dialect.connect(*arguments, **_connecting(options))
    except dialect.loaded_dbapi.Error as error:
        # Frames below hold the password, and test runners show them.
        __tracebackhide__ = True
        raise error.with_traceback(None) from None


def _connecting(named: Mapping[str, object]) -> dict[str, object]:
    options = {**_CONNECTING, **named}
    if "PGCONNECT_TIMEOUT" in os.environ and "connect_timeout" not in named:
        del options["connect_timeout"]
    # No prepared statements: poolers between us and the server lose them.
    return {**options, "client_encoding": "utf8", "prepare_threshold": None}


def _beginning(writes: bool, lock_timeout_s: float, gone_s: int) -> str:  # noqa: FBT001
    """Return the first statements of a transaction, in one message.

    They set everything that the store depends on, over the defaults of server, role and database.
    """
    mode = "READ COMMITTED, READ WRITE" if writes else "REPEATABLE READ, READ ONLY"
    settings = {
        "lock_timeout": max(1, round(lock_timeout_s * 1000)),
        "idle_in_transaction_session_timeout": gone_s * 1000 if writes else 0,
        "timezone": "'UTC'",
        "datestyle": "'ISO'",
        "extra_float_digits": 1,  # floats come back to the bit
    }
    lines = [f"SET LOCAL {name} = {value}" for name, value in settings.items()]
    return "; ".join(
        [f"SET TRANSACTION ISOLATION LEVEL {mode}", *lines, *([_KEPT] if writes else [])]
    )
