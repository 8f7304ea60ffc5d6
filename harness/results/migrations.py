"""Brings a database to the schema of this version, or refuses one that is newer."""

import importlib.metadata
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sqlalchemy import Connection, func, insert, inspect, select, text

from harness.errors import NewerSchemaError, NotAStoreError
from harness.results import postgresql, records, schema

Migration = Callable[[Connection], None]

_GROUPS_AND_CONDITIONS = (
    "ALTER TABLE runs ADD COLUMN group_id VARCHAR(32) NOT NULL DEFAULT ''",
    "ALTER TABLE runs ADD COLUMN session INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN label TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE runs ADD COLUMN conditions JSON NOT NULL DEFAULT '[]'",
    "ALTER TABLE runs ADD COLUMN check_outcome VARCHAR(32) NOT NULL DEFAULT 'none'",
    "ALTER TABLE runs ADD COLUMN check_reason TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE runs ADD COLUMN warmup_detected BOOLEAN",
    "UPDATE runs SET group_id = id",
    "CREATE INDEX runs_by_group ON runs (group_id, session)",
)


def _to_2(connection: Connection) -> None:
    """Each run of before is a group of its own, nothing checked its output."""
    for statement in _GROUPS_AND_CONDITIONS:
        connection.execute(text(statement))
    schema.telemetry.create(connection)


def _to_3(connection: Connection) -> None:
    """How the containers of before are quantized is not known."""
    connection.execute(text('ALTER TABLE runs ADD COLUMN "precision" TEXT'))


MIGRATIONS: Mapping[int, Migration] = MappingProxyType({2: _to_2, 3: _to_3})
"""What turns schema n-1 into schema n, by n. Schema 1 is the first, so nothing leads to it."""


def prepare(
    connection: Connection,
    location: str,
    *,
    supported: int = schema.SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Create the tables, or bring them up to date, within the connection's transaction.

    Raises:
        NewerSchemaError: a newer qnnfarm wrote the database.
        NotAStoreError: the database is somebody else's.
        StoreUnavailableError: its encoding does not hold every text.
    """
    postgresql.take_turns(connection, location)
    found = find_version(connection, location)
    if found is None:
        schema.metadata.create_all(connection)
        _stamp(connection, supported)
        return
    check_version(location, found, supported)
    for version in range(found + 1, supported + 1):
        migrations[version](connection)
        _stamp(connection, version)


def check_version(location: str, found: int, supported: int = schema.SCHEMA_VERSION) -> None:
    """Refuse a schema from the future.

    Raises:
        NewerSchemaError: a newer qnnfarm wrote the database.
    """
    if found > supported:
        raise NewerSchemaError(location, found, supported)


def find_version(connection: Connection, location: str) -> int | None:
    """The database's schema version; None for a database that is still empty.

    Raises:
        NotAStoreError: there are tables, and none says which schema they have.
    """
    tables = set(inspect(connection).get_table_names())
    if schema.schema_version.name not in tables:
        # A server's database may be shared with others; a file is either ours or it is not.
        if tables and (connection.dialect.name == "sqlite" or tables & set(schema.metadata.tables)):
            raise NotAStoreError(location, "it holds the tables of another program")
        return None
    version: int | None = connection.scalar(select(func.max(schema.schema_version.c.version)))
    if version is None:
        raise NotAStoreError(location, "it does not say which schema it has")
    return version


def _stamp(connection: Connection, version: int) -> None:
    connection.execute(
        insert(schema.schema_version).values(
            version=version,
            applied_at=records.now(),
            qnnfarm_version=importlib.metadata.version("qnnfarm"),
        )
    )
