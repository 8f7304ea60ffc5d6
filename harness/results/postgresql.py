"""PostgreSQL specifics: URL, driver, connection, and the start of transactions.

psycopg is imported when a database on a server is opened, not before: results in files need no
driver.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType

import sqlalchemy
from sqlalchemy import URL, Connection, Engine, event, func, make_url, select
from sqlalchemy.engine.interfaces import DBAPIConnection, Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from harness.errors import StoreUnavailableError

WRITES = "qnnfarm_writes"
"""Execution option of transactions that write."""
LOCK_NOT_AVAILABLE = "55P03"
_AWAY = frozenset(["57P01", "57P02", "57P03"])
"""Errors of a server that shuts down, has crashed, or is starting up."""

_DRIVER = "postgresql+psycopg"
_SCHEMES = frozenset([_DRIVER, "postgresql", "postgres"])
_OPENING = 0x716E6E6661726D  # "qnnfarm"
_ENCODINGS = frozenset(["UTF8", "SQL_ASCII"])  # SQL_ASCII is no encoding: it keeps our UTF-8
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


def parse(text: str) -> URL:
    """Parse the URL of a database on a PostgreSQL server.

    Raises:
        StoreUnavailableError: it is not a URL, or of another engine or driver. The error shows
            only the scheme, as anything else may be part of a password.
    """
    __tracebackhide__ = True
    scheme = text.partition("://")[0]
    if scheme not in _SCHEMES:
        reason = f"results are kept in SQLite files and in {_DRIVER}://USER@HOST/DATABASE"
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


def shown(url: URL) -> str:
    """Return the URL for display, without password and query, which may hold secrets."""
    return url.set(query={}).render_as_string(hide_password=True)


def make_engine(url: URL, *, read_only: bool, lock_timeout_s: float) -> Engine:
    """Create an engine that opens a connection for each transaction.

    Args:
        read_only: make transactions that write fail.
        lock_timeout_s: for how long a statement waits for another's lock.

    Raises:
        StoreUnavailableError: the driver is not installed.
    """
    try:
        # What has no password cannot show it.
        engine = sqlalchemy.create_engine(_told(url), poolclass=NullPool)
    except ImportError as error:
        reason = "PostgreSQL's driver is not installed: pip install 'qnnfarm[postgresql]'"
        raise StoreUnavailableError(shown(url), reason) from error

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
        connection.exec_driver_sql(_beginning(writes=writes, lock_timeout_s=lock_timeout_s))

    return engine


def _told(url: URL) -> URL:
    return URL.create(url.drivername, url.username, None, url.host, url.port, url.database)


def lock_schema(connection: Connection, location: str) -> None:
    """Keep others from creating the tables until the transaction has ended.

    Raises:
        StoreUnavailableError: the database's encoding does not hold every text.
    """
    if connection.dialect.name != "postgresql":
        return
    connection.execute(select(func.pg_advisory_xact_lock(_OPENING)))
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding not in _ENCODINGS:
        reason = f"its encoding {encoding} cannot hold every text: create one with ENCODING 'UTF8'"
        raise StoreUnavailableError(location, reason)


def is_lost(error: DBAPIError) -> bool:
    """Return whether a server went away, is not ready again, or a connection to it was cut."""
    state = getattr(error.orig, "sqlstate", "none")  # SQLite's errors have none
    if state is None:
        return isinstance(error, OperationalError)
    return error.connection_invalidated or state.startswith("08") or state in _AWAY


def _connected(dialect: Dialect, url: URL) -> DBAPIConnection:
    arguments, named = dialect.create_connect_args(url)
    try:
        return dialect.connect(*arguments, **_connecting(named))
    except dialect.loaded_dbapi.Error as error:
        # Frames below hold the password, and test runners show them.
        __tracebackhide__ = True
        raise error.with_traceback(None) from None


def _connecting(named: Mapping[str, object]) -> dict[str, object]:
    merged = {**_CONNECTING, **named}
    if "PGCONNECT_TIMEOUT" in os.environ and "connect_timeout" not in named:
        del merged["connect_timeout"]
    # No prepared statements: poolers between us and the server lose them.
    return {**merged, "client_encoding": "utf8", "prepare_threshold": None}


def _beginning(*, writes: bool, lock_timeout_s: float) -> str:
    """Return the first statements of a transaction, in one message.

    They set everything that the store depends on, whatever a server, role or database defaults to.
    """
    mode = "READ COMMITTED, READ WRITE" if writes else "REPEATABLE READ, READ ONLY"
    settings = {
        "lock_timeout": max(1, round(lock_timeout_s * 1000)),
        "idle_in_transaction_session_timeout": _GONE_S * 1000 if writes else 0,
        "timezone": "'UTC'",
        "datestyle": "'ISO'",
        "extra_float_digits": 1,  # floats come back to the bit
    }
    lines = [f"SET LOCAL {name} = {value}" for name, value in settings.items()]
    return "; ".join(
        [f"SET TRANSACTION ISOLATION LEVEL {mode}", *lines, *([_KEPT] if writes else [])]
    )
