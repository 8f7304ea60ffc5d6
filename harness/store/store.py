"""The results store: where runs and measurements are kept."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import NotAStoreError
from harness.store import engine, migrations, read, write
from harness.store.read import RunFilter
from harness.store.records import Measurement, Run, RunStatus, now

_EVERYTHING = RunFilter()


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


class ResultsStore:
    """Runs and measurements in one database.

    Several processes may write to one store at once. Each write is one transaction. A store may be
    used by several threads, and is closed by `close` or as a context manager.
    """

    def __init__(self, database: engine.Database) -> None:
        self._database = database

    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        create: bool = True,
        busy_timeout_s: float = engine.BUSY_TIMEOUT_S,
    ) -> Self:
        """Open a SQLite file by its path, or any database by its SQLAlchemy URL.

        With `create`, a missing database is made, an older one is migrated, and the running runs of
        processes that are gone become interrupted. Without, the database is only read.

        Raises:
            MissingStoreError: nothing is there, and `create` is off.
            NotAStoreError: it is some other file or database, or damaged.
            NewerSchemaError: a newer qnnfarm wrote it.
            StoreLockedError: another process holds it for longer than `busy_timeout_s`.
            StoreUnavailableError: it cannot be reached.
        """
        database = engine.open_database(location, create=create, busy_timeout_s=busy_timeout_s)
        try:
            if create:
                with database.writing() as connection:
                    migrations.prepare(connection, database.location)
                    write.mark_interrupted(connection)
                database.use_wal()
            else:
                _require_readable(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

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

        Raises:
            RunConflictError: there is a run of that identifier.
        """
        self.begin_run(run)
        recorder = RunRecorder(self, run)
        try:
            yield recorder
        except Exception as error:
            text = str(error) or type(error).__name__
            self._finish(recorder, "failed", text)
            raise
        except BaseException:
            self._finish(recorder, "interrupted", None)
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


def _require_readable(database: engine.Database) -> None:
    with database.reading() as connection:
        version = migrations.find_version(connection, database.location)
        if version is None:
            raise NotAStoreError(database.location, "it is empty")
        migrations.check_version(database.location, version)
