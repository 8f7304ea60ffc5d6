"""The results store: where runs and measurements are kept."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter

from harness.errors import (
    MissingStoreError,
    NotAStoreError,
    OlderSchemaError,
    StoreError,
    StoreUnavailableError,
)
from harness.results import (
    inventory,
    migrations,
    prune,
    read,
    room,
    schema,
    write,
)
from harness.results.database import BUSY_TIMEOUT_S, Database, exists, open_database
from harness.results.inventory import Holding
from harness.results.prune import Amount, Pruning
from harness.results.read import RunFilter
from harness.results.records import (
    CheckOutcome,
    Condition,
    Measurement,
    OutputCheck,
    RepetitionTelemetry,
    Run,
    RunStatus,
    TelemetrySeries,
    now,
)
from harness.results.room import Room
from harness.results.telemetry import pack

_EVERYTHING = RunFilter()
_CONDITIONS: TypeAdapter[tuple[Condition, ...]] = TypeAdapter(tuple[Condition, ...])


class RunRecorder:
    """Streams one run into the store; made by `ResultsStore.recording`."""

    def __init__(self, store: "ResultsStore", run: Run) -> None:
        self._store = store
        self.run = run
        self.generated_text: str | None = None

    def add(self, *measurements: Measurement) -> None:
        """Keep measurements as soon as they are there: one repetition at a time."""
        self._store.add_measurements(self.run.id, measurements)

    def add_library_versions(self, versions: Mapping[str, str]) -> None:
        """Keep versions that only the run could find out, such as Genie's own."""
        self._store.add_library_versions(self.run.id, versions)

    def add_values(
        self, values: Mapping[str, float], *, repetition: int = 0, is_warmup: bool = False
    ) -> None:
        """Keep one repetition's values by metric."""
        self.add(
            *(
                Measurement(metric=key, value=value, repetition=repetition, is_warmup=is_warmup)
                for key, value in values.items()
            )
        )

    def add_telemetry(
        self, series: Sequence[TelemetrySeries], *, repetition: int, is_warmup: bool = False
    ) -> None:
        """Keep what the sensors gave during one repetition; nothing is kept of no series."""
        if series:
            self._store.add_telemetry(
                self.run.id, series, repetition=repetition, is_warmup=is_warmup
            )

    def add_conditions(self, conditions: Iterable[Condition]) -> None:
        """Keep what was done to the device, or waited for, before the run."""
        self._store.add_conditions(self.run.id, tuple(conditions))

    def set_check(self, outcome: CheckOutcome, reason: str = "") -> None:
        """Keep what came of the check of the output; a run whose check failed must fail."""
        self._store.set_check(self.run.id, OutputCheck(outcome=outcome, reason=reason))

    def settle_warmup(self, warmups: int, *, detected: bool) -> None:
        """Of the repetitions kept as warm-ups, let only the first `warmups` stay warm-ups.

        While warm-up is being detected, every repetition is kept as one; this is said at the end.
        """
        self._store.settle_warmup(self.run.id, warmups=warmups, detected=detected)


class ResultsStore:
    """Runs and measurements in one database.

    Several processes may write to one store at once. Each write is one transaction. A store may be
    used by several threads, and is closed by `close` or as a context manager.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        create: bool = True,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> Self:
        """Open a SQLite file by its path, or a PostgreSQL database by its URL.

        With `create`, a missing database is made, an older one is migrated, and the running runs of
        processes that are gone become interrupted. Without, the database is only read; but an
        older one is migrated all the same, as it could not be read otherwise.

        Raises:
            MissingStoreError: nothing is there, or nothing yet in a server's database, and `create`
                is off.
            NotAStoreError: it is some other file or database, or damaged.
            NewerSchemaError: a newer qnnfarm wrote it.
            OlderSchemaError: an older one wrote it, and it can be read only.
            StoreLockedError: another process holds it for longer than `busy_timeout_s`.
            StoreUnavailableError: it cannot be reached.
        """
        __tracebackhide__ = True  # pytest would show the location, and so its password
        database = open_database(location, create=create, busy_timeout_s=busy_timeout_s)
        try:
            if create:
                _prepare(database)
            else:
                found = _require_readable(database)
                if found < schema.SCHEMA_VERSION:
                    _migrate(location, found, busy_timeout_s)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @staticmethod
    def check(location: str | Path) -> None:
        """Find out whether `open` would work, and leave everything as it is.

        Raises:
            NotAStoreError: it is some other file or database, or damaged.
            NewerSchemaError: a newer qnnfarm wrote it.
            StoreLockedError: another process holds it.
            StoreUnavailableError: it cannot be reached, or cannot be made there.
        """
        __tracebackhide__ = True
        if not exists(location):
            return
        database = open_database(location, create=False)
        try:
            with database.reading() as connection:
                found = migrations.find_version(connection, database.location)
            if found is not None:
                migrations.check_version(database.location, found)
        finally:
            database.close()

    @property
    def location(self) -> str:
        """The path or URL, without its password."""
        return self._database.location

    def write_run(self, run: Run) -> None:
        """Write a run with its measurements: all of it or nothing.

        Raises:
            RunConflictError: there is a run of that identifier, or a repetition is there twice.
        """
        with self._database.writing() as connection:
            write.insert_run(connection, self.location, run)

    def begin_run(self, run: Run) -> None:
        """Write down that a run has begun, before anything can go wrong with it.

        Raises:
            RunConflictError: there is a run of that identifier.
            ValueError: the run's status is not `running`.
        """
        if run.status != "running":
            raise ValueError(f"a run that begins is running, not {run.status}")
        self.write_run(run)

    def add_measurements(self, run_id: str, measurements: Sequence[Measurement]) -> None:
        """Add measurements to a run that has begun.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: the run is finished, or a repetition is there already.
        """
        with self._database.writing() as connection:
            write.add_measurements(connection, self.location, run_id, measurements)

    def add_library_versions(self, run_id: str, versions: Mapping[str, str]) -> None:
        """Add to the library versions of a run that has begun.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: the run is finished, or has another version of the same library.
        """
        with self._database.writing() as connection:
            write.add_library_versions(connection, self.location, run_id, versions)

    def add_telemetry(
        self,
        run_id: str,
        series: Sequence[TelemetrySeries],
        *,
        repetition: int,
        is_warmup: bool = False,
    ) -> None:
        """Add one repetition's telemetry to a run that has begun.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: the run is finished, or the repetition's telemetry is there already.
            TelemetryRecordError: a channel is there twice, or there is too much of it.
        """
        samples = pack(series)  # takes a while, and nobody has to wait for it
        with self._database.writing() as connection:
            write.add_telemetry(
                connection,
                self.location,
                run_id,
                samples,
                repetition=repetition,
                is_warmup=is_warmup,
            )

    def add_conditions(self, run_id: str, conditions: Sequence[Condition]) -> None:
        """Add to the conditions of a run that has begun.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: the run is finished, or would have too many conditions.
            ValueError: a condition is not made of JSON scalars.
        """
        checked = _CONDITIONS.validate_python(tuple(conditions))
        with self._database.writing() as connection:
            write.add_conditions(connection, self.location, run_id, checked)

    def set_check(self, run_id: str, check: OutputCheck) -> None:
        """Say what came of the check of a run's output.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: the run is finished.
        """
        with self._database.writing() as connection:
            write.set_check(connection, self.location, run_id, check)

    def settle_warmup(self, run_id: str, *, warmups: int, detected: bool) -> None:
        """Make measured repetitions of all warm-ups from number `warmups` on.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: the run is finished, or has such measured repetitions already.
        """
        with self._database.writing() as connection:
            write.settle_warmup(
                connection, self.location, run_id, warmups=warmups, detected=detected
            )

    def finish_run(
        self,
        run_id: str,
        *,
        status: RunStatus = "done",
        error: str | None = None,
        generated_text: str | None = None,
    ) -> None:
        """Say how a run ended.

        Raises:
            UnknownRunError: there is no such run.
            RunConflictError: it is finished already.
            ValueError: a failed run without its error.
        """
        if status == "running" or (status == "failed") != bool(error):
            raise ValueError(f"a run cannot end as {status} with error {error!r}")
        with self._database.writing() as connection:
            write.finish_run(
                connection,
                self.location,
                run_id,
                status=status,
                finished_at=now(),
                error=error,
                generated_text=generated_text,
            )

    @contextmanager
    def recording(self, run: Run) -> Iterator[RunRecorder]:
        """Begin a run, finish it by how the block ends: done, failed with error, or interrupted.

        What ends the block comes out of it, also where the store cannot be told; then a note on
        it says so.

        Raises:
            RunConflictError: there is a run of that identifier.
        """
        self.begin_run(run)
        recorder = RunRecorder(self, run)
        try:
            yield recorder
        except BaseException as error:
            failed = isinstance(error, Exception)
            text = (str(error) or type(error).__name__) if failed else None
            try:
                self._finish(recorder, "failed" if failed else "interrupted", text)
            except StoreError as told:
                error.add_note(f"and the run is not finished in the store: {told}")
            raise
        self._finish(recorder, "done", None)

    def _finish(self, recorder: RunRecorder, status: RunStatus, error: str | None) -> None:
        self.finish_run(
            recorder.run.id, status=status, error=error, generated_text=recorder.generated_text
        )

    def list_runs(self, wanted: RunFilter = _EVERYTHING) -> tuple[Run, ...]:
        """The wanted runs, oldest first.

        Raises:
            CorruptRunError: one of them cannot have been written by qnnfarm.
        """
        with self._database.reading() as connection:
            return read.list_runs(connection, self.location, wanted)

    def get_run(self, run_id: str) -> Run:
        """One run.

        Raises:
            UnknownRunError: there is none of that identifier.
            CorruptRunError: it cannot have been written by qnnfarm.
        """
        with self._database.reading() as connection:
            return read.get_run(connection, self.location, run_id)

    def telemetry(self, run_id: str) -> tuple[RepetitionTelemetry, ...]:
        """A run's telemetry, warm-ups first, then in the order of repetitions.

        Raises:
            UnknownRunError: there is no run of that identifier.
            CorruptRunError: what is stored cannot have been written by qnnfarm.
        """
        with self._database.reading() as connection:
            return read.telemetry(connection, self.location, run_id)

    def with_telemetry(self, newest: int) -> frozenset[str]:
        """The newest runs that have telemetry, so many at most."""
        with self._database.reading() as connection:
            return read.with_telemetry(connection, newest)

    def holdings(self) -> tuple[Holding, ...]:
        """What there is of each day, container and device, the oldest day first.

        Raises:
            NotAStoreError: a row cannot be read.
        """
        with self._database.reading() as connection:
            return inventory.holdings(connection, self.location)

    def room(self) -> Room:
        """How much room the database takes."""
        with self._database.reading() as connection:
            return room.room(connection)

    def prunable(self, wanted: Pruning) -> Amount:
        """What `prune` would remove now."""
        with self._database.reading() as connection:
            return prune.plan(connection, wanted)

    def vouching(self, before: datetime) -> int:
        """How many perplexities are older, which `prune` lets stay."""
        with self._database.reading() as connection:
            return prune.vouching(connection, before)

    def prune(self, wanted: Pruning) -> Generator[Amount, None, None]:
        """Remove old runs, or just their telemetry, as one goes through what this gives.

        Each is what one short transaction removed; others write in between. Perplexities that are
        done stay, and so does a group that has a newer run, or one that is under way.
        """
        return prune.prune(self._database, wanted)

    def give_back(self) -> str:
        """Give free room to the disk; why that could not be, in words, or nothing."""
        return room.give_back(self._database)

    def close(self) -> None:
        """Give up the connections."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()


def _prepare(database: Database) -> None:
    with database.writing() as connection:
        migrations.prepare(connection, database.location)
        write.mark_interrupted(connection)
    database.use_wal()


def _require_readable(database: Database) -> int:
    with database.reading() as connection:
        version = migrations.find_version(connection, database.location)
    if version is None:
        # On a server, others make the database before we make its tables.
        if "://" in database.location:
            raise MissingStoreError(database.location)
        raise NotAStoreError(database.location, "it is empty")
    migrations.check_version(database.location, version)
    return version


def _migrate(location: str | Path, found: int, busy_timeout_s: float) -> None:
    __tracebackhide__ = True
    writable = open_database(location, create=True, busy_timeout_s=busy_timeout_s)
    try:
        _prepare(writable)
    except StoreUnavailableError as error:
        raise OlderSchemaError(
            writable.location, found, schema.SCHEMA_VERSION, error.reason
        ) from error
    finally:
        writable.close()
