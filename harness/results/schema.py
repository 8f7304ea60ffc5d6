"""The tables of the results store, and what brings a database to them.

Portable SQLAlchemy Core types only, as tests run on both engines: SQLite is the default, PostgreSQL
works by URL (`postgresql+psycopg://...`).

History of `SCHEMA_VERSION`:
    1  runs, measurements, schema version.
    2  groups of runs (sessions, comparisons), conditions, output checks, warm-up detection;
       telemetry.
    3  precision of containers.
    4  labels, plan, branch, size and parameters of containers; memory, build and clocks of devices;
       the program's hash, the depth of a prompt, sessions at once; origin of imports; artifacts.
    5  terms and verdicts of comparisons.
    6  alerts.
    7  what was reviewed for alerts.
    8  source of measurements.

To change the tables: change them here, raise `SCHEMA_VERSION`, add a line above and a migration
from the last version to `MIGRATIONS`.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

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
    text,
)

from harness.errors import NewerSchemaError, NotAStoreError
from harness.results import postgresql, records

SCHEMA_VERSION = 8


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


metadata = MetaData()

schema_version = Table(
    "qnnfarm_schema",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("applied_at", UtcDateTime, nullable=False),
    Column("qnnfarm_version", String(64), nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("kind", String(32), nullable=False),
    Column("status", String(32), nullable=False),
    Column("error", Text),
    Column("writer", Text, nullable=False),
    # The container.
    Column("model", Text, nullable=False),
    Column("container_sha256", String(64), nullable=False),
    Column("target", Text, nullable=False),
    Column("ars", JSON, nullable=False),
    Column("cl", Integer, nullable=False),
    Column("n_splits", Integer, nullable=False),
    Column("precision", Text),
    Column("container_bytes", BigInteger),
    Column("parameters", BigInteger),
    # The device.
    Column("device_serial", Text, nullable=False),
    Column("soc", Text, nullable=False),
    Column("emulator", Boolean, nullable=False),
    Column("device_model", Text),
    Column("device_manufacturer", Text),
    Column("dsp_arch", Text),
    Column("abi", Text),
    Column("android_version", Text),
    Column("ram_bytes", BigInteger),
    Column("os_build", Text),
    Column("build_fingerprint", Text),
    Column("clocks", JSON, nullable=False),
    # The workload.
    Column("runner", Text, nullable=False),
    Column("runner_sha256", String(64)),
    Column("prompt_tokens", Integer),
    Column("depth_tokens", Integer),
    Column("max_new_tokens", Integer),
    Column("repetitions", Integer, nullable=False),
    Column("warmup", Integer, nullable=False),
    Column("sampler", JSON, nullable=False),
    Column("prompt", Text),
    Column("prompt_sha256", String(64)),
    Column("dataset_sha256", String(64)),
    Column("perplexity_positions", String(32)),
    Column("perplexity_windows", Integer),
    Column("perplexity_tokens", Integer),
    # Where it comes from.
    Column("toolchain", Text, nullable=False),
    Column("toolchain_versions", JSON, nullable=False),
    Column("library_versions", JSON, nullable=False),
    Column("qnnfarm_version", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("git_commit", Text),
    Column("git_dirty", Boolean),
    Column("git_branch", Text),
    Column("origin_tool", Text),
    Column("origin_file", Text),
    Column("origin_sha256", String(64)),
    # What it gave, beside its measurements.
    Column("generated_text", Text),
    # How it was measured.
    Column("group_id", String(32), nullable=False),
    Column("session", Integer, nullable=False),
    Column("label", Text, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("plan", Text),
    Column("concurrent_sessions", Integer),
    Column("conditions", JSON, nullable=False),
    Column("check_outcome", String(32), nullable=False),
    Column("check_reason", Text, nullable=False),
    Column("warmup_detected", Boolean),
    CheckConstraint("status <> 'failed' OR error IS NOT NULL", name="failed_runs_have_an_error"),
    Index("runs_by_subject", "model", "target", "created_at"),
    Index("runs_by_group", "group_id", "session"),
    Index("runs_by_time", "created_at"),
)

measurements = Table(
    "measurements",
    metadata,
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("metric", String(64), primary_key=True),
    Column("is_warmup", Boolean, primary_key=True),
    Column("repetition", Integer, primary_key=True, autoincrement=False),
    Column("value", Double, nullable=False),
    Column("source", String(32)),
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
    Column("name", String(200), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),  # the content: harness/results/artifacts.py
    Column("size_bytes", BigInteger, nullable=False),
    Index("artifacts_by_content", "sha256"),
)

comparisons = Table(
    "comparisons",
    metadata,
    Column("group_id", String(32), primary_key=True),  # of both sides' runs
    Column("created_at", UtcDateTime, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("threshold", Double, nullable=False),
    Column("verdicts", JSON, nullable=False),
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
)

reviews = Table(
    "reviews",
    metadata,
    Column("runs", String(200), primary_key=True),  # those that the newest review judged
)

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
    """Migrate: each older run becomes a group of its own, with an unchecked output."""
    for statement in _GROUPS_AND_CONDITIONS:
        connection.execute(text(statement))
    telemetry.create(connection)


def _to_3(connection: Connection) -> None:
    """Migrate: the precision of older containers is unknown."""
    connection.execute(text('ALTER TABLE runs ADD COLUMN "precision" TEXT'))


_ORIGINS_AND_BUILDS = (
    "ALTER TABLE runs ADD COLUMN container_bytes BIGINT",
    "ALTER TABLE runs ADD COLUMN parameters BIGINT",
    "ALTER TABLE runs ADD COLUMN ram_bytes BIGINT",
    "ALTER TABLE runs ADD COLUMN os_build TEXT",
    "ALTER TABLE runs ADD COLUMN build_fingerprint TEXT",
    "ALTER TABLE runs ADD COLUMN clocks JSON NOT NULL DEFAULT '{}'",
    "ALTER TABLE runs ADD COLUMN runner_sha256 VARCHAR(64)",
    "ALTER TABLE runs ADD COLUMN depth_tokens INTEGER",
    "ALTER TABLE runs ADD COLUMN git_branch TEXT",
    "ALTER TABLE runs ADD COLUMN origin_tool TEXT",
    "ALTER TABLE runs ADD COLUMN origin_file TEXT",
    "ALTER TABLE runs ADD COLUMN origin_sha256 VARCHAR(64)",
    "ALTER TABLE runs ADD COLUMN labels JSON NOT NULL DEFAULT '{}'",
    "ALTER TABLE runs ADD COLUMN plan TEXT",
    "ALTER TABLE runs ADD COLUMN concurrent_sessions INTEGER",
    "CREATE INDEX runs_by_time ON runs (created_at)",
)


def _to_4(connection: Connection) -> None:
    """Migrate: of older runs none of this is known."""
    for statement in _ORIGINS_AND_BUILDS:
        connection.execute(text(statement))
    artifacts.create(connection)


def _to_5(connection: Connection) -> None:
    """Migrate: older comparisons are judged by the default terms."""
    comparisons.create(connection)


def _to_6(connection: Connection) -> None:
    """Migrate: the next review makes the alerts of all that was measured."""
    alerts.create(connection)


def _to_7(connection: Connection) -> None:
    """Create the table of reviews, empty: the next review judges all measurements."""
    reviews.create(connection)


def _to_8(connection: Connection) -> None:
    """Migrate: older measurements are the runtimes' own figures."""
    connection.execute(text("ALTER TABLE measurements ADD COLUMN source VARCHAR(32)"))


MIGRATIONS: Mapping[int, Migration] = MappingProxyType(
    {2: _to_2, 3: _to_3, 4: _to_4, 5: _to_5, 6: _to_6, 7: _to_7, 8: _to_8}
)
"""Migrations from schema n-1 to schema n, by n."""


def prepare(
    connection: Connection,
    location: str,
    *,
    supported: int = SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Create the tables, or bring them up to date, within the connection's transaction.

    Raises:
        NewerSchemaError: a newer qnnfarm wrote the database.
        NotAStoreError: the database belongs to another program.
        StoreUnavailableError: its encoding cannot hold every text.
    """
    postgresql.lock_schema(connection, location)
    found = find_version(connection, location)
    if found is None:
        metadata.create_all(connection)
        _stamp(connection, supported)
        return
    check_version(location, found, supported)
    for version in range(found + 1, supported + 1):
        migrations[version](connection)
        _stamp(connection, version)


def check_version(location: str, found: int, supported: int = SCHEMA_VERSION) -> None:
    """Refuse a schema from the future.

    Raises:
        NewerSchemaError: a newer qnnfarm wrote the database.
    """
    if found > supported:
        raise NewerSchemaError(location, found, supported)


def find_version(connection: Connection, location: str) -> int | None:
    """Read the schema version; None if the database is empty.

    Raises:
        NotAStoreError: there are tables, but no schema version.
    """
    tables = set(inspect(connection).get_table_names())
    if schema_version.name not in tables:
        # A server's database may be shared with others; a file is either ours or it is not.
        if tables and (connection.dialect.name == "sqlite" or tables & set(metadata.tables)):
            raise NotAStoreError(location, "it holds the tables of another program")
        return None
    version: int | None = connection.scalar(select(func.max(schema_version.c.version)))
    if version is None:
        raise NotAStoreError(location, "its schema version is missing")
    return version


def _stamp(connection: Connection, version: int) -> None:
    connection.execute(
        insert(schema_version).values(
            version=version,
            applied_at=records.now(),
            qnnfarm_version=importlib.metadata.version("qnnfarm"),
        )
    )
