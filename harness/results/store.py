"""Results store: runs with their measurements and telemetry in one database."""

import fnmatch
import gc
import hashlib
import threading
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import islice, starmap
from operator import add, attrgetter
from pathlib import Path
from typing import Any, Self

from sqlalchemy import (
    Connection,
    RowMapping,
    Select,
    String,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)

from buildlib.closeable import Closeable
from harness.errors import (
    CorruptRunError,
    MissingStoreError,
    NotStoredError,
    StoreError,
    StoreUnavailableError,
    TelemetryRecordError,
    WrongUseError,
)
from harness.results import schema
from harness.results.artifacts import ArtifactFolder
from harness.results.database import (
    BUSY_TIMEOUT_S,
    ResultsDatabase,
    database_file,
    exists,
    open_database,
    refuse_unreadable_rows,
)
from harness.results.identity import container_name
from harness.results.provenance import has_ended
from harness.results.records import (
    SIDES,
    ArtifactKind,
    ArtifactRecord,
    ComparisonRecord,
    ContainerInfo,
    RepetitionTelemetry,
    Run,
    RunHead,
    RunKind,
    RunMeans,
    RunStatus,
    to_name,
    to_storable,
)
from harness.results.rows import RunParser, parse_artifact, parse_comparison, parse_telemetry
from harness.results.run_recorder import RunRecorder, insert_artifact, insert_run, interrupt_tries

_ROWS_AT_ONCE = 1000
_MOST_IDS = 500
"""Databases limit the values of one query."""
_CLOSING_S = 1.0
_SHORTEST_ID = 4
"""Digits of the beginning of an id or a hash that may stand for it."""
LATEST = "latest"
_MOST_NAMED = 5
_EQUAL = ("kind", "model", "target", "soc", "emulator", "container_sha256", "plan")
"""Columns that a filter may ask for; status depends on writers."""
_PATHS = {column.name: path for column, path in schema.RUN.paths()}


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Filter of runs; `None` matches every run.

    Attributes:
        group_ids: of the groups.
        sessions: by their numbers.
        since: created then or later; with its time zone.
        newest: at most this many, the newest ones.
        plan: name of the plan that they are cells of.
        container: a model, as `my-llama` or `my-llama W4A16`, or the start of a container's hash.
        labels: all of them: `KEY=VALUE`, a key, or a pattern of a cell's label, as `tiny/*`.
    """

    kind: RunKind | None = None
    status: RunStatus | None = None
    model: str | None = None
    target: str | None = None
    soc: str | None = None
    emulator: bool | None = None
    container_sha256: str | None = None
    group_ids: Collection[str] | None = None
    sessions: Collection[int] | None = None
    since: datetime | None = None
    newest: int | None = None
    plan: str | None = None
    container: str | None = None
    labels: Sequence[str] = ()

    def matches(self, run: Run) -> bool:
        """Return whether a run is one of those that are asked for, but for `newest`."""
        return (
            all(value == attrgetter(_PATHS[column])(run) for column, value in self.equal.items())
            and self.status in {None, run.status}
            and (self.group_ids is None or run.group_id in map(to_name, self.group_ids))
            and (self.sessions is None or run.session in self.sessions)
            and (self.since is None or run.created_at >= self.since)
            and self._has_container(run.container)
            and all(_has_label(run, label) for label in self.labels)
        )

    @property
    def equal(self) -> Mapping[str, object]:
        """The values that are asked for of columns, as the store has them."""
        values = {column: to_name(getattr(self, column)) for column in _EQUAL}
        return {column: value for column, value in values.items() if value is not None}

    def _has_container(self, container: ContainerInfo) -> bool:
        name = self.container
        if name is None or name in {container.model, container_name(container)}:
            return True
        return len(name) >= _SHORTEST_ID and container.sha256.startswith(name.lower())


def _has_label(run: Run, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    if equals and run.labels.get(key) == value:
        return True
    return wanted in run.labels or fnmatch.fnmatchcase(run.label.partition("#")[0], wanted)


EVERYTHING = RunFilter()


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's collector of circles away while very many records are made, which have none.

    It would walk all that were made, again and again: a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ResultsStore(Closeable):
    """Runs and measurements in one database.

    Several processes may write to one store at once. Each write is one transaction. A store may be
    used by several threads, and is closed by `close` or as a context manager. A run that is not
    there raises `NotStoredError`, one that qnnfarm cannot have written `CorruptRunError`, and one
    that is written twice `RunConflictError`.

    Attributes:
        database: for `harness.results.maintenance`.
    """

    def __init__(self, database: ResultsDatabase) -> None:
        self.database = database

    @classmethod
    def open(
        cls, location: str | Path, *, create: bool = True, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> Self:
        """Open a SQLite file by its path, or a PostgreSQL database by its URL.

        With `create`, a missing database is created. Without, the database is read-only. In either
        case running runs whose process has ended become interrupted, if this user may write.

        Raises:
            MissingStoreError: there is no database, or a server's is empty, and `create` is off.
            StoreUnavailableError: it is another kind of file or database, or damaged; another
                qnnfarm wrote it; another process holds it for longer than `busy_timeout_s`; it
                cannot be reached.
        """
        __tracebackhide__ = True  # pytest would show the location, and so its password
        database = open_database(location, create=create, busy_timeout_s=busy_timeout_s)
        try:
            ended = _prepare(database) if create else _require_readable(database)
            if ended:
                _interrupt(location, ended)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @classmethod
    def open_existing(cls, location: str | Path) -> Self:
        """Open a database for writing as `open` does, but make none."""
        cls.open(location, create=False).close()
        return cls.open(location)

    @staticmethod
    def check(location: str | Path) -> None:
        """Check whether `open` would work, without changing anything."""
        __tracebackhide__ = True
        if not exists(location):
            return
        database = open_database(location, create=False)
        try:
            with database.reading() as connection:
                schema.has_tables(connection, database.location)
        finally:
            database.close()

    @property
    def location(self) -> str:
        """The path or URL, without its password."""
        return self.database.location

    def write_run(self, run: Run) -> None:
        """Write a run with its measurements, in one transaction."""
        self.database.insist(lambda connection: insert_run(connection, self.location, run))

    def known_origins(self, tool: str) -> frozenset[str]:
        """Return the hashes of all runs that were imported from files of a tool."""
        with self.database.reading() as connection:
            return _known_origins(connection, tool)

    def import_runs(
        self, runs: Sequence[Run], name: str, content: bytes, kind: ArtifactKind
    ) -> tuple[Run, ...]:
        """Write the runs of another tool's file that nobody imported before; return those.

        Args:
            runs: of one tool.
            name: of the file.
            content: kept with each of them.
        """
        sha256 = ArtifactFolder.of(self.location).put(content)
        artifact = ArtifactRecord(
            name=name[:200], kind=kind, sha256=sha256, size_bytes=len(content)
        )
        tools = {run.origin.tool for run in runs if run.origin}

        def write(connection: Connection) -> tuple[Run, ...]:
            origins = _known_origins(connection, *tools)
            new = tuple(run for run in runs if run.origin and run.origin.sha256 not in origins)
            for run in new:
                insert_run(connection, self.location, run)
                insert_artifact(connection, self.location, run.id, artifact)
            return new

        return self.database.insist(write) or ()

    def add_runs(self, runs: Sequence[Run]) -> tuple[Run, ...]:
        """Write the runs of another database that are not here yet, all or none; return those."""

        def write(connection: Connection) -> tuple[Run, ...]:
            known = frozenset(connection.scalars(select(schema.runs.c.id)))
            new = tuple(run for run in runs if run.id not in known)
            for run in new:
                insert_run(connection, self.location, run)
            return new

        return self.database.insist(write) or ()

    def begin_run(self, run: Run) -> RunRecorder:
        """Write a run that begins, before anything can go wrong with it."""
        if run.status != "running":
            raise ValueError(f"a run that begins is running, not {run.status}")
        self.write_run(run)
        return RunRecorder(self.database, run)

    def interrupt_tries(self, group_id: str, session: int) -> None:
        """Mark tries of a plan's cell that go on as interrupted, once its result is known."""
        self.database.insist(lambda connection: interrupt_tries(connection, group_id, session))

    @contextmanager
    def recording(self, run: Run) -> Iterator[RunRecorder]:
        """Begin a run, and finish it as the block ends: done, failed, or interrupted.

        The exception that ends the block is raised from it even if the store cannot be written;
        a note on the exception then says so.
        """
        recorder = self.begin_run(run)
        try:
            yield recorder
        except BaseException as error:
            is_failure = isinstance(error, Exception)
            text = (str(error) or type(error).__name__) if is_failure else None
            try:
                recorder.finish("failed" if is_failure else "interrupted", error=text)
            except StoreError as unwritten:
                error.add_note(f"and the run is not finished in the store: {unwritten}")
            raise
        recorder.finish()

    def list_runs(self, wanted: RunFilter = EVERYTHING) -> tuple[Run, ...]:
        """List the runs that match, oldest first."""
        rows, measurements = self._fetch(select_runs(wanted))
        parser = RunParser(self.location)
        runs = (parser.parse(row, measurements.get(row["id"], ())) for row in rows)
        fitting = [run for run in runs if wanted.matches(run)]
        return tuple(reversed(fitting[: wanted.newest]))

    def get_run(self, run_id: str) -> Run:
        """Read one run."""
        this_run = schema.runs.c.id == to_storable(run_id)
        rows, measurements = self._fetch(select(schema.runs).where(this_run))
        if not rows:
            raise NotStoredError(self.location, f"run {run_id!r}")
        return RunParser(self.location).parse(rows[0], measurements.get(run_id, ()))

    def heads(self, plan: str = "") -> tuple[RunHead, ...]:
        """Read the place of each run in the history, oldest first.

        Runs that are still running and sides of comparisons are left out.

        Args:
            plan: only runs of the plan of this name.
        """
        query = _select_heads()
        if plan:
            query = query.where(schema.runs.c.plan == to_name(plan))
        with self.database.reading() as connection, refuse_unreadable_rows(self.location):
            return tuple(starmap(RunHead, connection.execute(query).all()))

    def mark_heads(self) -> str:
        """Return a value that changes with any place that `heads` reads, in far less time."""
        runs = schema.runs.c
        columns = (runs.id, runs.created_at, runs.git_commit, runs.git_branch, runs.subject)
        lines = (func.coalesce(cast(column, String), "") + "\n" for column in columns)
        with self.database.reading() as connection:
            rows = connection.scalars(_select_heads().with_only_columns(reduce(add, lines))).all()
        return hashlib.sha256("".join(rows).encode()).hexdigest()

    def means(
        self, chosen: Select[Any] | None = None, metrics: Collection[str] = ()
    ) -> Mapping[str, Mapping[str, float]]:
        """Read the means of runs by metric, of those that have any.

        The database computes them, so that a million repetitions become some ten thousand rows
        before Python sees any of them.

        Args:
            chosen: a query of rows of runs; by default all runs.
            metrics: those whose means are needed; by default all.
        """
        table = schema.measurements
        key = (table.c.run_id, table.c.metric)
        query = select(*key, func.avg(table.c.value)).group_by(*key)
        query = query.where(table.c.is_warmup.is_(False))
        if chosen is not None:
            ids = chosen.with_only_columns(schema.runs.c.id).subquery()
            query = query.join(ids, table.c.run_id == ids.c.id)
        if metrics:
            query = query.where(table.c.metric.in_(metrics))
        means = defaultdict[str, dict[str, float]](dict)
        with self.database.reading() as connection, refuse_unreadable_rows(self.location):
            for run_id, metric, value in connection.execute(query).all():
                means[run_id][metric] = value
        return means

    def measured(self) -> tuple[RunMeans, ...]:
        """Read all runs with their means, oldest first."""
        means, parser = self.means(), RunParser(self.location)
        # A server's driver holds all rows of a query unless they are asked for in parts.
        in_parts = select(schema.runs).execution_options(yield_per=_ROWS_AT_ONCE)
        with self.database.reading() as connection, refuse_unreadable_rows(self.location):
            rows = connection.execute(in_parts.order_by(*_OLDEST_FIRST)).mappings()
            return tuple(RunMeans(parser.parse(row), means.get(row["id"], {})) for row in rows)

    def get_runs(self, run_ids: Sequence[str], *, measured: bool = True) -> tuple[Run, ...]:
        """Read runs, oldest first; those that are not there are left out.

        Args:
            measured: with their measurements.
        """
        result, parser = list[Run](), RunParser(self.location)
        for start in range(0, len(run_ids), _MOST_IDS):
            some = schema.runs.c.id.in_(run_ids[start : start + _MOST_IDS])
            rows, measurements = self._fetch(select(schema.runs).where(some), measured=measured)
            result += [parser.parse(row, measurements.get(row["id"], ())) for row in rows]
        return tuple(sorted(result, key=lambda run: (run.created_at, run.id)))

    def write_comparison(self, comparison: ComparisonRecord) -> None:
        """Write the terms of a comparison, or its verdicts in their place."""
        table = schema.comparisons

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(table.c.group_id == comparison.group_id))
            connection.execute(insert(table).values(comparison.model_dump()))

        self.database.insist(write)

    def comparisons(self) -> dict[str, ComparisonRecord]:
        """Read the comparisons with their terms, by the group of their runs."""
        with self.database.reading() as connection, refuse_unreadable_rows(self.location):
            rows = connection.execute(select(schema.comparisons)).mappings().all()
        return {row["group_id"]: parse_comparison(self.location, row) for row in rows}

    def find_runs(self, identifier: str) -> tuple[Run, ...]:
        """Find the run, or the runs of the group, with an id or the beginning of one.

        Args:
            identifier: `latest` is the group of the newest run.

        Raises:
            NotStoredError: there is none.
            WrongUseError: several could be meant.
            CorruptRunError: qnnfarm cannot have written one of them.
        """
        prefix = identifier.lower()
        if prefix == LATEST and (newest := self.list_runs(RunFilter(newest=1))):
            return self.list_runs(RunFilter(group_ids=[newest[0].group_id]))
        if len(prefix) < _SHORTEST_ID or not set(prefix) <= set("0123456789abcdef"):
            raise NotStoredError(self.location, f"run {identifier!r}")
        table = schema.runs.c
        ids, groups = (
            select(column).distinct().where(column.startswith(prefix)).limit(_MOST_NAMED)
            for column in (table.id, table.group_id)
        )
        with self.database.reading() as connection:
            runs, group_ids = connection.scalars(ids).all(), connection.scalars(groups).all()
        if len(group_ids) == 1 and (len(runs) != 1 or runs == group_ids):
            return self.list_runs(RunFilter(group_ids=group_ids))
        if len(runs) == 1 and not group_ids:
            return (self.get_run(runs[0]),)
        if not runs and not group_ids:
            raise NotStoredError(self.location, f"run {identifier!r}")
        names = ", ".join(name[:12] for name in (*runs, *group_ids))
        raise WrongUseError(f"{identifier} is the beginning of several ids: {names}")

    def telemetry(self, run_id: str) -> tuple[RepetitionTelemetry, ...]:
        """Read a run's telemetry, warm-ups first, then by repetition."""
        table = schema.telemetry
        with self.database.reading() as connection:
            self._require_run(connection, run_id)
            rows = connection.execute(
                select(table)
                .where(table.c.run_id == run_id)
                .order_by(table.c.is_warmup.desc(), table.c.repetition)
            )
            try:
                return tuple(map(parse_telemetry, rows.mappings()))
            except TelemetryRecordError as error:
                raise CorruptRunError(self.location, run_id, str(error)) from error

    def artifacts(self, run_id: str) -> tuple[ArtifactRecord, ...]:
        """List the files that are kept with a run, by name; `read_artifact` reads one."""
        with self.database.reading() as connection:
            self._require_run(connection, run_id)
        return self.artifacts_of([run_id])[run_id]

    def artifacts_of(self, run_ids: Sequence[str]) -> dict[str, tuple[ArtifactRecord, ...]]:
        """List the files that are kept with each of these runs, by name."""
        table = schema.artifacts
        query = select(table).where(table.c.run_id.in_(run_ids)).order_by(table.c.name)
        kept: dict[str, list[ArtifactRecord]] = {run_id: [] for run_id in run_ids}
        with self.database.reading() as connection, refuse_unreadable_rows(self.location):
            for row in connection.execute(query).mappings().all():
                kept[row["run_id"]].append(parse_artifact(self.location, row))
        return {run_id: tuple(artifacts) for run_id, artifacts in kept.items()}

    def _require_run(self, connection: Connection, run_id: str) -> None:
        query = select(schema.runs.c.id).where(schema.runs.c.id == to_storable(run_id))
        if connection.scalar(query) is None:
            raise NotStoredError(self.location, f"run {run_id!r}")

    def read_artifact(self, artifact: ArtifactRecord) -> bytes:
        """Read the content of a file that is kept with a run."""
        return ArtifactFolder.of(self.location).read(artifact.sha256)

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes when a run ends or goes, or an alert changes."""
        runs, alerts = schema.runs.c, schema.alerts.c
        ends = select(func.count(), func.max(runs.finished_at)).where(runs.status != "running")
        changes = select(func.count(), func.max(alerts.changed_at))
        with self.database.reading() as connection:
            return (*connection.execute(ends).one(), *connection.execute(changes).one())

    def newest_with_telemetry(
        self, newest: int, among: Container[str] | None = None
    ) -> frozenset[str]:
        """Find the newest runs that have telemetry, at most `newest` of them."""
        table, runs = schema.telemetry, schema.runs
        has_some = select(table.c.run_id).where(table.c.run_id == runs.c.id).exists()
        query = select(runs.c.id).where(has_some).order_by(*_NEWEST_FIRST)
        with self.database.reading() as connection:
            if among is None:
                return frozenset(connection.scalars(query.limit(newest)))
            found = (one for one in connection.scalars(query) if one in among)
            return frozenset(islice(found, newest))

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    def _fetch(
        self, query: Select[Any], *, measured: bool = True
    ) -> tuple[Sequence[RowMapping], Mapping[str, Sequence[RowMapping]]]:
        """Return the rows of runs, and of their measurements by run."""
        with self.database.reading() as connection, refuse_unreadable_rows(self.location):
            rows = connection.execute(query).mappings().all()
            return rows, _measurements(connection, query) if measured else {}


class LazyResultsStore(Closeable):
    """Results database that is made when it is first written to. Thread-safe.

    Args:
        location: as `ResultsStore.open` takes it. A database that exists is opened at once.

    Raises:
        StoreError: it exists and cannot be used, or cannot be made there.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._path = database_file(location)
        self._store: ResultsStore | None = None
        if self._path is None or self._path.exists():
            self._store = ResultsStore.open(location)
        else:
            ResultsStore.check(location)

    @property
    def location(self) -> str:
        """The path or URL, without its password; the same before it is made and after."""
        return str(self._path) if self._store is None else self._store.location

    @property
    def existing(self) -> ResultsStore | None:
        """The database, if it exists by now."""
        return self._store

    def open(self) -> ResultsStore:
        """Open the database; make it if it does not exist."""
        with self._lock:
            if self._store is None:
                self._store = ResultsStore.open(self._location)
            return self._store

    def close(self) -> None:
        """Close its connections."""
        with self._lock:
            if self._store is not None:
                self._store.close()


_OLDEST_FIRST = (schema.runs.c.created_at, schema.runs.c.session, schema.runs.c.id)
_NEWEST_FIRST = (schema.runs.c.created_at.desc(), schema.runs.c.id.desc())


def select_runs(wanted: RunFilter) -> Select[Any]:
    """Return the query of a filter, newest first."""
    table = schema.runs
    query = select(table).order_by(*_NEWEST_FIRST)
    for column, value in wanted.equal.items():
        query = query.where(table.c[column] == value)
    # An interrupted run is stored as running until the next writer comes by.
    unsure = wanted.status in {"interrupted", "running"}
    if wanted.status is not None:
        statuses = {wanted.status, "running"} if unsure else {wanted.status}
        query = query.where(table.c.status.in_(sorted(statuses)))
    if wanted.group_ids is not None:
        query = query.where(table.c.group_id.in_([to_name(one) for one in wanted.group_ids]))
    if wanted.sessions is not None:
        query = query.where(table.c.session.in_(wanted.sessions))
    if wanted.since is not None:
        query = query.where(table.c.created_at >= wanted.since)
    unsure = unsure or wanted.container is not None or bool(wanted.labels)
    return query if unsure or wanted.newest is None else query.limit(wanted.newest)


def _select_heads() -> Select[Any]:
    runs = schema.runs.c
    return (
        select(
            runs.id,
            runs.created_at,
            runs.git_commit,
            runs.git_branch,
            runs.subject,
            (runs.status == "done") & (runs.check_outcome != "failed"),
            runs.device_serial,
            runs.container_sha256,
            runs.conditions,
        )
        .where(runs.status != "running", runs.label.not_in(SIDES))
        .order_by(*_OLDEST_FIRST)
    )


def _known_origins(connection: Connection, *tools: str) -> frozenset[str]:
    table = schema.runs.c
    return frozenset(
        connection.scalars(select(table.origin_sha256).where(table.origin_tool.in_(tools)))
    )


def _measurements(connection: Connection, query: Select[Any]) -> Mapping[str, Sequence[RowMapping]]:
    table = schema.measurements
    ids = query.with_only_columns(schema.runs.c.id).subquery()
    rows = connection.execute(
        select(table)
        .join(ids, table.c.run_id == ids.c.id)
        .order_by(table.c.run_id, table.c.metric, table.c.is_warmup.desc(), table.c.repetition)
    )
    by_run = defaultdict[str, list[RowMapping]](list)
    for row in rows.mappings():
        by_run[row["run_id"]].append(row)
    return by_run


def _prepare(database: ResultsDatabase) -> list[str]:
    """Create what is missing; return the running runs of processes that are gone."""
    with database.writing() as connection:
        schema.prepare(connection, database.location)
        ended = _ended_runs(connection)
    database.use_wal()
    return ended


def _require_readable(database: ResultsDatabase) -> list[str]:
    """Refuse what holds no results; return the running runs of processes that are gone."""
    with database.reading() as connection:
        if schema.has_tables(connection, database.location):
            return _ended_runs(connection)
    # On a server, others make the database before we make its tables.
    if "://" in database.location:
        raise MissingStoreError(database.location)
    raise StoreUnavailableError(database.location, "it is empty")


def _ended_runs(connection: Connection) -> list[str]:
    table = schema.runs.c
    query = select(table.id, table.writer, table.created_at).where(table.status == "running")
    return [run_id for run_id, *writer in connection.execute(query) if has_ended(*writer)]


def _interrupt(location: str | Path, ids: Sequence[str]) -> None:
    """Mark running runs whose processes are gone, for hosts that cannot know of these."""
    # Who may not write reads them as interrupted all the same.
    with (
        suppress(StoreError),
        closing(open_database(location, create=True, busy_timeout_s=_CLOSING_S)) as writable,
        writable.writing() as connection,
    ):
        table = schema.runs.c
        for run_id in ids:  # whose last write may have become visible since
            still_running = (table.id == run_id) & (table.status == "running")
            connection.execute(
                update(schema.runs).where(still_running).values(status="interrupted")
            )
