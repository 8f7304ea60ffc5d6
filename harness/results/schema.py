"""The tables of the results store.

Portable SQLAlchemy Core types only, as tests run on both engines: SQLite is the default, PostgreSQL
works by URL (`postgresql+psycopg://...`). Records of `harness.results.records` say which columns
there are: a field that is added there is stored, read, filtered and exported.

To change the tables: change them here or there, and raise `SCHEMA_VERSION`. Databases of other
versions are refused.
"""

import importlib.metadata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.types import TypeEngine

from harness.errors import StoreUnavailableError
from harness.results.metrics import Measurement
from harness.results.records import ArtifactRecord, ComparisonRecord, Record, Run, now

SCHEMA_VERSION = 3
_BEFORE_1 = "qnnfarm_schema"
"""A table of all databases before version 1."""
_OLDER = (
    "an older qnnfarm wrote it, whose tables this one does not read: name another --db to begin a "
    "new database, and keep this one for the qnnfarm that wrote it"
)
_OPENING = 0x716E6E6661726D  # "qnnfarm"
_ENCODINGS = frozenset(["UTF8", "SQL_ASCII"])  # SQL_ASCII is no encoding: it keeps our UTF-8


class UtcDateTime(TypeDecorator[datetime]):
    """Times in UTC; for SQLite, which stores no time zone, it is dropped and added again."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a value for the database."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(
        self,
        value: datetime | None,
        dialect: Dialect,  # noqa: ARG002  the base class names it
    ) -> datetime | None:
        """Convert a value from the database."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_TYPES: Mapping[object, type[TypeEngine[Any]]] = {
    str: Text,
    int: BigInteger,
    float: Double,
    bool: Boolean,
    datetime: UtcDateTime,
}
_PREFIXED = frozenset({"origin", "check", "perplexity"})
"""Records whose columns all begin with the name of the record; and such columns of others."""
_PREFIXED_COLUMNS = frozenset(
    {
        "container_sha256",
        "container_size_bytes",
        "device_serial",
        "device_model",
        "device_manufacturer",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class RecordLayout:
    """Columns of a record: one for each field, and those of the records in it.

    Attributes:
        columns: by field.
        records: by field. A record that is missing leaves all of its columns empty.
        names: of all columns.
    """

    record: type[BaseModel]
    columns: Mapping[str, Column[Any]]
    records: Mapping[str, "RecordLayout"]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        record: type[BaseModel],
        *,
        key: Collection[str] = (),
        name: str = "",
        empty: bool = False,
    ) -> "RecordLayout":
        """Lay out a record.

        Args:
            key: fields of the primary key.
            name: the field that holds the record, if it is one of another.
            empty: whether the record may be missing.
        """
        columns, records = dict[str, Column[Any]](), dict[str, RecordLayout]()
        for field, info in record.model_fields.items():
            kind, optional = _type_of(info.annotation)
            column = f"{name}_{field}"
            if isinstance(kind, type) and issubclass(kind, Record):
                records[field] = cls.of(kind, name=field, empty=optional)
            elif kind != tuple[Measurement, ...]:  # which have a table of their own
                columns[field] = Column(
                    column if name in _PREFIXED or column in _PREFIXED_COLUMNS else field,
                    _TYPES.get(kind, Text if get_origin(kind) is Literal else JSON),
                    primary_key=field in key,
                    nullable=optional or empty,
                )
        inner = (name for layout in records.values() for name in layout.names)
        names = (*(column.name for column in columns.values()), *inner)
        return cls(record, columns, records, names)

    def paths(self) -> Iterator[tuple[Column[Any], str]]:
        """Yield each column with the path of its attribute, such as `device.soc`."""
        for field, column in self.columns.items():
            yield column, field
        for field, layout in self.records.items():
            yield from ((column, f"{field}.{path}") for column, path in layout.paths())


def _type_of(annotation: object) -> tuple[object, bool]:
    """Return the type of a field's values, and whether None is one of them."""
    optional = type(None) in get_args(annotation)
    kind = get_args(annotation)[0] if optional else annotation
    return (get_args(kind)[0] if get_origin(kind) is Annotated else kind), optional


metadata = MetaData()

schema_version = Table(
    "qnnfarm_results",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("qnnfarm_version", String(64), nullable=False),
)

RUN = RecordLayout.of(Run, key={"id"})
runs = Table(
    "runs",
    metadata,
    *(column for column, _ in RUN.paths()),
    Column("subject", String(16), nullable=False),  # of harness.results.identity
    Column("writer", Text, nullable=False),
    CheckConstraint("status <> 'failed' OR error IS NOT NULL", name="failed_runs_have_an_error"),
    Index("runs_by_model", "model", "target", "created_at"),
    Index("runs_by_subject", "subject"),
    Index("runs_by_group", "group_id", "session"),
    Index("runs_by_time", "created_at"),
)
of_cells = runs.c.plan.is_not(None) & runs.c.origin_tool.is_(None)
"""Condition of rows that are runs of a plan's cell: one for each try."""
_done_cells = (runs.c.status == "done") & of_cells
Index(
    "cells_are_done_once",
    runs.c.group_id,
    runs.c.session,
    unique=True,
    sqlite_where=_done_cells,
    postgresql_where=_done_cells,
)

measurements = Table(
    "measurements",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    *RecordLayout.of(Measurement, key={"metric", "is_warmup", "repetition"}).columns.values(),
    sqlite_with_rowid=False,  # half the bytes, and those of a run together
)

telemetry = Table(
    "telemetry",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("is_warmup", Boolean, primary_key=True),
    Column("repetition", Integer, primary_key=True, autoincrement=False),
    Column("samples", LargeBinary, nullable=False),  # see harness/results/telemetry.py
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    *RecordLayout.of(ArtifactRecord, key={"name"}).columns.values(),
    Index("artifacts_by_content", "sha256"),  # the content: harness/results/artifacts.py
)

comparisons = Table(
    "comparisons", metadata, *RecordLayout.of(ComparisonRecord, key={"group_id"}).columns.values()
)

alerts = Table(
    "alerts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("series", String(80), nullable=False, index=True),  # of harness/results/history.py
    Column("metric", String(64), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", String(32), nullable=False),
    Column("began_at", UtcDateTime, nullable=False),
    Column("found_at", UtcDateTime, nullable=False),
    Column("ratio", Double, nullable=False),
    Column("good_commit", Text),
    Column("bad_commit", Text),
    Column("note", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("changed_at", UtcDateTime, nullable=False),
    Column("told_at", UtcDateTime),
    Column("devices", JSON, nullable=False),
    Column("backfilled", Boolean, nullable=False),
)

reviews = Table(
    "reviews",
    metadata,
    Column("subject", String(16), primary_key=True),
    Column("judged", String(64), nullable=False),  # mark of the runs that the newest review judged
    Column("until", UtcDateTime),  # time of the newest of all runs then
)


def prepare(connection: Connection, location: str) -> None:
    """Create the tables, unless they are there, within the connection's transaction."""
    _lock(connection, location)
    if has_tables(connection, location):
        return
    metadata.create_all(connection, checkfirst=False)
    connection.execute(
        insert(schema_version).values(
            version=SCHEMA_VERSION,
            created_at=now(),
            qnnfarm_version=importlib.metadata.version("qnnfarm"),
        )
    )


def has_tables(connection: Connection, location: str) -> bool:
    """Return whether the tables are there; False where the database is empty and free for them."""
    tables = set(inspect(connection).get_table_names())
    if _BEFORE_1 in tables:
        raise StoreUnavailableError(location, _OLDER)
    if schema_version.name not in tables:
        # A server's database may be shared with others; a file is either ours or it is not.
        if tables and (connection.dialect.name == "sqlite" or tables & set(metadata.tables)):
            raise StoreUnavailableError(location, "it holds the tables of another program")
        return False
    version: int | None = connection.scalar(select(func.max(schema_version.c.version)))
    if version is None:
        raise StoreUnavailableError(location, "its schema version is missing")
    if version > SCHEMA_VERSION:
        raise StoreUnavailableError(
            location,
            f"it has schema {version}, newer than the {SCHEMA_VERSION} that this qnnfarm "
            "knows: update qnnfarm",
        )
    if version < SCHEMA_VERSION:
        raise StoreUnavailableError(location, _OLDER)
    return True


def _lock(connection: Connection, location: str) -> None:
    """Keep others from creating the tables until the transaction has ended."""
    if connection.dialect.name != "postgresql":
        return
    connection.execute(select(func.pg_advisory_xact_lock(_OPENING)))
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding not in _ENCODINGS:
        reason = f"its encoding {encoding} cannot hold every text: create one with ENCODING 'UTF8'"
        raise StoreUnavailableError(location, reason)
