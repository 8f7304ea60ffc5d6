"""The tables of the results store.

Portable SQLAlchemy Core types only, as tests run on both engines: SQLite is the default, PostgreSQL
works by URL (`postgresql+psycopg://...`).

To change the tables: change them here and raise `SCHEMA_VERSION`, as a database of other tables is
refused.
"""

import importlib.metadata
from datetime import UTC, datetime

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

from harness.errors import NewerSchemaError, NotAStoreError, OlderSchemaError
from harness.results import postgresql, records

SCHEMA_VERSION = 1
_BEFORE_1 = "qnnfarm_schema"
"""A table of all databases before version 1."""


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
    "qnnfarm_results",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("created_at", UtcDateTime, nullable=False),
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


def prepare(connection: Connection, location: str) -> None:
    """Create the tables where there are none, within the connection's transaction.

    Raises:
        NewerSchemaError, OlderSchemaError: another qnnfarm wrote the database.
        NotAStoreError: the database belongs to another program.
        StoreUnavailableError: its encoding cannot hold every text.
    """
    postgresql.lock_schema(connection, location)
    if not has_tables(connection, location):
        metadata.create_all(connection)
        connection.execute(
            insert(schema_version).values(
                version=SCHEMA_VERSION,
                created_at=records.now(),
                qnnfarm_version=importlib.metadata.version("qnnfarm"),
            )
        )


def has_tables(connection: Connection, location: str) -> bool:
    """Return whether the tables are there, or the database is empty and free for them.

    Raises:
        NewerSchemaError, OlderSchemaError: another qnnfarm wrote the database.
        NotAStoreError: there are tables, but no schema version.
    """
    tables = set(inspect(connection).get_table_names())
    if _BEFORE_1 in tables:
        raise OlderSchemaError(location)
    if schema_version.name not in tables:
        # A server's database may be shared with others; a file is either ours or it is not.
        if tables and (connection.dialect.name == "sqlite" or tables & set(metadata.tables)):
            raise NotAStoreError(location, "it holds the tables of another program")
        return False
    found: int | None = connection.scalar(select(func.max(schema_version.c.version)))
    if found is None:
        raise NotAStoreError(location, "its schema version is missing")
    if found > SCHEMA_VERSION:
        raise NewerSchemaError(location, found, SCHEMA_VERSION)
    if found < SCHEMA_VERSION:
        raise OlderSchemaError(location)
    return True
