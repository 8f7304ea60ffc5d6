"""Database of a ledger: a SQLite file for a host or a group, or PostgreSQL for a lab.

Transactions are short, and those that write come one after the other: SQLite has one writer, and
on PostgreSQL each takes an advisory lock first. So a check in a transaction holds until its end.
"""

import hashlib
import os
import shlex
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from harness.clock import Clock
from harness.devices.socket_owner import user_name
from harness.errors import LedgerError, StoreUnavailableError
from harness.paths import state_dir
from harness.pool import records
from harness.pool.owner import host_id
from harness.results.database import (
    LOCK_NOT_AVAILABLE,
    WRITES,
    RollingBack,
    database_file,
    enter_wal,
    first_line,
    full_disk,
    is_lost,
    make_file_engine,
    make_server_engine,
    parse_server_url,
    shown_url,
)

FORMAT = 10
_APPLICATION_ID = 0x716E6670
_BUSY_S = 30.0
_AWAY_S = 0.2
_FIRST_S = 5.0
"""So long may a server refuse or cut connections that this process never reached."""
_AWAY = ("refused", "closed the connection", "reset by peer")
_COMES = "the database system is "
"""So begins what a server says that starts up, recovers or shuts down, in versions 9 to 18."""
_LONGEST_TRY_S = 10.0
"""A longer time between two tries is none of the server: this process was stopped, or slept."""
_STOPPED_S = 5
"""So long may a process sleep in the middle of a transaction, which others wait for."""
_QUEUED_S = 1.0
"""So long a server keeps a place in the queue of writers; whoever lives asks for another one.

Of the processes of a host that lost its network, only those are served then that asked last.
"""
_LOCK = 0x716E6670
_CHANNEL = "qnnfarm_pool"
_CHANGES = "SELECT value FROM pool_counters WHERE name = 'changes'"
_COUNT_CHANGE = (
    "INSERT INTO pool_counters VALUES ('changes', 1)"
    " ON CONFLICT (name) DO UPDATE SET value = value + 1"
)
_COUNTERS = MappingProxyType({"format": FORMAT, "token": 0, "facts": 0})

T = TypeVar("T")


class _LostServerError(Exception):
    """The server went away, before or in the middle of a transaction."""


class _BusyServerError(Exception):
    """Others wrote all the time that the server keeps a place in the queue."""


class Database:
    """Connection that the threads of this process share for one transaction at a time.

    The first use opens it; a forked child opens its own connection. Everything raises `LedgerError`
    when the database cannot be used.

    Attributes:
        path: the SQLite file; `None` for a server's database.
        location: for people, without a password.
    """

    def __init__(self, location: str | Path) -> None:
        __tracebackhide__ = True  # pytest would show the location, and so its password
        self.path = database_file(location)
        self._lock = threading.RLock()
        self._pid = 0
        self._connection: Connection | None = None
        self._inherited: list[Connection] = []
        self._news = threading.Condition()
        self._own_changes = 0
        self._changes = 0
        self._data_version = 0
        self._was_there = False
        self._away_s = 0.0
        self._failed_at = 0.0
        if self.path is not None:
            self.location = str(self.path)
            self._engine = make_file_engine(self._connect_file)
            return
        try:
            url = parse_server_url(str(location))
            self.location = shown_url(url)
            self._engine = make_server_engine(
                url, read_only=False, lock_timeout_s=_QUEUED_S, gone_s=_STOPPED_S
            )
        except StoreUnavailableError as error:
            raise LedgerError(error.location, error.reason) from None

    def close(self) -> None:
        """Close the database; its next use opens it again."""
        with self._lock:
            self._drop()

    def write(self, work: Callable[[Connection], T], *, tell: bool = True) -> T:
        """Do work in a transaction that alone may write; all of it happens, or nothing.

        If a server goes away, the work is done again once it is back: its end may be unknown, so
        a second time must change nothing.

        Args:
            tell: let requests know that wait for a change, of this process and of others.
        """

        def write(connection: Connection) -> T:
            if self.path is None:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            result = work(connection)
            if tell:
                connection.exec_driver_sql(_COUNT_CHANGE if self.path else f"NOTIFY {_CHANNEL}")
            return result

        result = self._insist(write, writes=True)
        if tell:
            with self._news:
                self._own_changes += 1
                self._news.notify_all()
        return result

    def read(self, work: Callable[[Connection], T]) -> T:
        """Do work in a transaction that reads one consistent view."""
        return self._insist(work, writes=False)

    def version(self) -> tuple[int, int]:
        """Return numbers that differ once this process or another one has changed the ledger."""
        with self._lock, self._typed_errors():
            try:
                driver: Any = self._open().connection.dbapi_connection
                if self.path is not None:
                    return self._own_changes, self._file_version(driver)
                driver.pgconn.consume_input()
                while driver.pgconn.notifies() is not None:
                    self._changes += 1
            except Exception as error:
                if self.path is not None or isinstance(error, LedgerError) or not self._was_there:
                    raise
                self._drop()
                self._changes += 1
            return self._own_changes, self._changes

    def wait(self, version: tuple[int, int], timeout_s: float) -> tuple[int, int]:
        """Wait for a change since that version, and return the latest.

        Changes by this process are known at once, those by others when the time is over.
        """
        with self._news:
            self._news.wait_for(lambda: self._own_changes != version[0], timeout_s)
        return self.version()

    def _file_version(self, driver: sqlite3.Connection) -> int:
        """Return the number of changes by others that were told; their heartbeats wake nobody."""
        data_version = driver.execute("PRAGMA data_version").fetchone()[0]
        if data_version != self._data_version:
            self._data_version = data_version
            row = driver.execute(_CHANGES).fetchone()
            self._changes = (row[0] if row else 0) - self._own_changes
        return self._changes

    def times(self, db: Connection, clock: Clock, /) -> tuple[float, float]:
        """Return the time in seconds since 1970, and that of heartbeats.

        Both are the server's. For a file, heartbeats have the host's `CLOCK_BOOTTIME`, which nobody
        sets.
        """
        if self.path is not None:
            return clock.now(), clock.boottime()
        query = "SELECT extract(epoch FROM clock_timestamp())::float8"
        now = float(db.exec_driver_sql(query).scalar_one())
        return now, now

    def _insist(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        queued_s = 0.0  # not by a clock, which counts when this host slept or had no network, too
        while True:
            try:
                with self._lock, self._typed_errors():
                    return self._transact(work, writes=writes)
            except _BusyServerError:
                queued_s += _QUEUED_S
                if queued_s >= _BUSY_S:
                    reason = f"other processes have written to it for {_BUSY_S:.0f} s"
                    raise LedgerError(self.location, reason) from None
            except _LostServerError as error:
                before, self._failed_at = self._failed_at, time.monotonic()
                self._away_s += min(self._failed_at - before, _LONGEST_TRY_S) if before else 0.0
                if self._away_s > (_BUSY_S if self._was_there else _FIRST_S):
                    raise LedgerError(self.location, str(error)) from None
                time.sleep(_AWAY_S)

    def _transact(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        connection = self._open()
        connection.execution_options(**{WRITES: writes})
        try:
            with connection.begin():
                return work(connection)
        except Exception:
            raise
        except BaseException:  # Ctrl-C between BEGIN and its bookkeeping, too
            self._drop()
            raise

    def _open(self) -> Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        if self._connection is not None:  # closing it would end the parent's session
            self._inherited.append(self._connection)
            self._connection = None
        connection = self._engine.connect()
        connection.detach()
        try:
            if self.path is None:
                self._was_there = True
                self._prepare_server(connection)
            else:
                self._prepare_file(connection, str(self.path))
        except BaseException:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        self._data_version = 0
        self._away_s = self._failed_at = 0.0
        return connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            with suppress(Exception):
                connection.close()

    def _prepare_server(self, connection: Connection) -> None:
        connection.execution_options(**{WRITES: True})
        with connection.begin():
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            records.METADATA.create_all(connection)
            _add_counters(connection)
            counters = records.counters.c
            of_format = sqlalchemy.select(counters.value).where(counters.name == "format")
            self._check_format(connection.scalars(of_format).one())
            connection.exec_driver_sql(f"LISTEN {_CHANNEL}")
        driver: Any = connection.connection.dbapi_connection
        driver.add_notify_handler(self._count_change)

    def _count_change(self, _: object) -> None:
        self._changes += 1

    def _connect_file(self) -> sqlite3.Connection:
        assert self.path is not None  # noqa: S101 - for mypy
        prepare(self.path)
        return sqlite3.connect(
            self.path,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
            factory=RollingBack,
        )

    def _prepare_file(self, connection: Connection, path: str) -> None:
        # A file that is not our ledger is left as it is. Read one by one while another process
        # creates it, its numbers would look like those of a foreign database.
        with connection.begin():
            application, version, tables = (
                int(connection.exec_driver_sql(query).scalar_one())
                for query in (
                    "PRAGMA application_id",
                    "PRAGMA user_version",
                    "SELECT count(*) FROM sqlite_master",
                )
            )
        if application != _APPLICATION_ID and (application or version or tables):
            raise _damaged(path, "it is some other database")
        if version:
            self._check_format(version)
        driver: Any = connection.connection.dbapi_connection
        enter_wal(driver.cursor(), _BUSY_S)
        # A power cut may lose the last transactions: leases, which it ends anyway.
        driver.execute("PRAGMA synchronous = NORMAL")
        if not version:
            connection.execution_options(**{WRITES: True})
            with connection.begin():
                _create(connection)

    def _check_format(self, version: int) -> None:
        if version > FORMAT:
            reason = f"a newer qnnfarm wrote it (format {version})"
            raise LedgerError(self.location, f"{reason}: install that one on this host, too")
        if version < FORMAT:
            raise _damaged(self.location, f"an older qnnfarm wrote it (format {version})")

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, OSError, ValueError) as error:
            cause = error.orig if isinstance(error, DBAPIError) and error.orig else error
            if getattr(cause, "sqlstate", None) == LOCK_NOT_AVAILABLE:
                raise _BusyServerError from None
            if isinstance(error, DBAPIError) and self.path is None and is_lost(error):
                self._drop()
                text = str(cause)
                self._was_there |= _COMES in text
                if self._was_there or any(words in text for words in _AWAY):
                    raise _LostServerError(first_line(cause)) from None
            raise self._error(cause) from None

    def _error(self, cause: BaseException) -> LedgerError:
        reason = getattr(cause, "strerror", None) or first_line(cause)
        if self.path is None:
            is_damaged = isinstance(cause, ValueError)
            return (_damaged if is_damaged else LedgerError)(self.location, reason)
        if not isinstance(cause, sqlite3.OperationalError | OSError):
            return _damaged(self.location, reason)  # or a value that means nothing
        return LedgerError(self.location, full_disk(self.path.parent, cause) or reason)


def _create(connection: Connection) -> None:
    if connection.exec_driver_sql("PRAGMA user_version").scalar_one():
        return  # another process was faster
    records.METADATA.create_all(connection)
    _add_counters(connection)
    connection.exec_driver_sql(f"PRAGMA user_version = {FORMAT}")
    connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION_ID}")


def _damaged(location: str, reason: str) -> LedgerError:
    return LedgerError(location, f"{reason}; while nothing is leased it may be moved away")


def _add_counters(connection: Connection) -> None:
    add = sqlalchemy.text("INSERT INTO pool_counters VALUES (:name, :value) ON CONFLICT DO NOTHING")
    rows = [{"name": name, "value": value} for name, value in _COUNTERS.items()]
    connection.execute(add, rows)


_NETWORK_TYPES = frozenset(
    ["9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.glusterfs", "fuse.rclone",
     "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
     "ocfs2", "orangefs", "smb3", "smbfs"]
)  # fmt: skip
"""File systems that several hosts may have mounted; SQLite's locks are not theirs."""


def default_path() -> Path:
    """Return the path of this user's ledger."""
    return state_dir() / "pool.db"


def place_of(path: Path) -> int:
    """Return a number that another machine, folder or copy of a ledger does not have."""
    machine = host_id().partition("/")[2]
    text = f"{machine} {path.resolve()} {path.stat().st_ino}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7])


def prepare(path: Path) -> None:
    """Make the ledger's folder if it is missing.

    Raises:
        LedgerError: the folder cannot have this user's ledger.
        OSError: it cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_folder(path)
    if kind := network_file_system(path.parent):
        reason = (
            f"it would lie on a network file system ({kind}), where other hosts take it for theirs:"
            " name a local folder with QNNFARM_STATE_DIR, or share a ledger in PostgreSQL"
        )
        raise LedgerError(str(path), reason)


def check_folder(path: Path) -> None:
    """Check that the folder of a ledger, if it exists, may have one of this user."""
    with suppress(FileNotFoundError):
        if obstacle := _folder_obstacle(path.parent, path.parent.stat()):
            raise LedgerError(str(path), obstacle)


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the network file system that a folder is on; empty if it is on none."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2:3] == [device] and (kind := rest.partition(" ")[0]):
                return kind if kind in _NETWORK_TYPES else ""
    return ""


def _folder_obstacle(folder: Path, about: os.stat_result) -> str:
    """Return why a folder can have no ledger of this user; empty if it can."""
    quoted = shlex.quote(str(folder))
    if about.st_mode & stat.S_IWOTH:
        mode = f"mode {stat.S_IMODE(about.st_mode):04o}"
        return (
            f"every user of this host may write its folder ({mode}): "
            f"`chmod o-w {quoted}`, or name another with QNNFARM_STATE_DIR"
        )
    if os.geteuid() in {0, about.st_uid}:
        return ""
    return (
        f"its folder belongs to {user_name(about.st_uid)}: name another with QNNFARM_STATE_DIR, "
        "or share a ledger in PostgreSQL"
    )
