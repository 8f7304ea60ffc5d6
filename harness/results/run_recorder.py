"""Recording of one run into the store while it goes on."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec

from pydantic import TypeAdapter
from sqlalchemy import Connection, Table, insert, select, update
from sqlalchemy.exc import IntegrityError

from harness.errors import NotStoredError, RunConflictError
from harness.results import schema
from harness.results.artifacts import ArtifactFolder
from harness.results.database import ResultsDatabase
from harness.results.provenance import this_writer
from harness.results.records import (
    MAX_CONDITIONS,
    ArtifactKind,
    ArtifactRecord,
    CheckOutcome,
    Condition,
    Measurement,
    OutputCheck,
    Run,
    RunStatus,
    TelemetrySeries,
    now,
    to_name,
    to_storable,
)
from harness.results.rows import row_of
from harness.results.telemetry import pack

_CONDITIONS: TypeAdapter[tuple[Condition, ...]] = TypeAdapter(tuple[Condition, ...])
_UNFINISHED = ("running", "interrupted")


_P = ParamSpec("_P")


def _insisting(
    write: "Callable[Concatenate[RunRecorder, _P], None]",
) -> "Callable[Concatenate[RunRecorder, _P], None]":
    """Make a method, which is one transaction, outlast a restart of the server."""

    @functools.wraps(write)
    def insist(recorder: "RunRecorder", /, *args: _P.args, **named: _P.kwargs) -> None:
        recorder._database.insist(lambda: write(recorder, *args, **named))  # noqa: SLF001

    return insist


class RunRecorder:
    """Streams one run that has begun into the store.

    Each method is one transaction, which `ResultsDatabase.insist` repeats if the server restarts.
    It raises `NotStoredError` if there is no such run, and `RunConflictError` if the run is
    finished, or already has what is added.

    Attributes:
        run: as it began.
        generated_text: what the model generated; kept when the run finishes.
        profiles, traces: what the runtime recorded of each process, in their order, for those who
            keep it with the run; empty where it recorded nothing.
    """

    def __init__(self, database: ResultsDatabase, run: Run) -> None:
        self._database = database
        self.run = run
        self.generated_text: str | None = None
        self.profiles: list[str] = []
        self.traces: list[str] = []

    @_insisting
    def add(self, *measurements: Measurement) -> None:
        """Add measurements, such as those of one repetition."""
        with self._writing() as connection:
            _insert_measurements(connection, self._database.location, self.run.id, measurements)

    def add_values(
        self,
        values: Mapping[str, float],
        *,
        repetition: int = 0,
        is_warmup: bool = False,
        clocked: Collection[str] = (),
    ) -> None:
        """Add one repetition's values by metric.

        Args:
            clocked: metrics whose source is the clock of the runner's token callback.
        """
        self.add(
            *(
                Measurement(
                    metric=key,
                    value=value,
                    repetition=repetition,
                    is_warmup=is_warmup,
                    source="token_callback" if key in clocked else None,
                )
                for key, value in values.items()
            )
        )

    @_insisting
    def add_library_versions(self, versions: Mapping[str, str]) -> None:
        """Add versions that only the run could find out, such as Genie's own."""
        with self._writing() as connection:
            column = schema.runs.c.library_versions
            kept = dict(connection.execute(select(column).where(self._this_run)).scalar_one())
            for name, version in versions.items():
                if kept.setdefault(str(to_name(name)), str(to_name(version))) != to_name(version):
                    raise self._conflict(f"it has version {kept[name]} of {name}, not {version}")
            self._update(connection, library_versions=kept)

    @_insisting
    def add_telemetry(
        self, series: Sequence[TelemetrySeries], *, repetition: int, is_warmup: bool = False
    ) -> None:
        """Add the telemetry of one repetition; an empty one is not stored.

        Raises:
            TelemetryRecordError: a channel occurs twice, or there are too many samples.
        """
        if not series:
            return
        samples = pack(series)  # takes a while, so do it before locking the database
        row = {"run_id": self.run.id, "is_warmup": is_warmup, "repetition": repetition}
        with self._writing() as connection:
            reason = "telemetry of that repetition exists already"
            with _conflicts(self._database.location, self.run.id, reason):
                connection.execute(insert(schema.telemetry).values(**row, samples=samples))

    def add_artifact(
        self, name: str, content: bytes, kind: ArtifactKind = "other"
    ) -> ArtifactRecord:
        """Keep a file with the run: its content beside the database, its name in it.

        Raises:
            ArtifactError: it is too large, or cannot be written.
        """
        location = self._database.location
        sha256 = ArtifactFolder.of(location).put(content)
        artifact = ArtifactRecord(name=name, kind=kind, sha256=sha256, size_bytes=len(content))

        def write() -> None:
            with self._writing() as connection:
                insert_artifact(connection, location, self.run.id, artifact)

        self._database.insist(write)
        return artifact

    @_insisting
    def set_runner_sha256(self, sha256: str) -> None:
        """Record the hash of the program that runs on the device."""
        with self._writing() as connection:
            self._update(connection, runner_sha256=sha256)

    @_insisting
    def set_concurrency(self, sessions: int) -> None:
        """Record the most sessions that ran at once on the host, this one included."""
        with self._writing() as connection:
            self._update(connection, concurrent_sessions=sessions)

    @_insisting
    def add_conditions(self, conditions: Iterable[Condition]) -> None:
        """Add what was done to the device, or waited for, before the run.

        Raises:
            ValueError: a condition is not made of JSON scalars.
        """
        checked = _CONDITIONS.validate_python(tuple(conditions))
        with self._writing() as connection:
            column = schema.runs.c.conditions
            before = connection.execute(select(column).where(self._this_run)).scalar_one()
            if before[len(before) - len(checked) :] == list(checked):
                return  # a write without an answer was kept
            if len(before) + len(checked) > MAX_CONDITIONS:
                raise self._conflict(f"more than {MAX_CONDITIONS} conditions")
            self._update(connection, conditions=[*before, *checked])

    @_insisting
    def set_check(self, outcome: CheckOutcome, reason: str = "") -> None:
        """Record the outcome of the output check; a run whose check failed must fail."""
        check = OutputCheck(outcome=outcome, reason=reason)
        with self._writing() as connection:
            self._update(connection, check_outcome=check.outcome, check_reason=check.reason)

    @_insisting
    def settle_warmup(self, warmups: int, *, detected: bool) -> None:
        """Turn all warm-ups from number `warmups` on into measured repetitions.

        While warm-up is being detected, every repetition is stored as a warm-up.
        """
        reason = "it has measured repetitions already"
        with self._writing() as connection:
            with _conflicts(self._database.location, self.run.id, reason):
                for table in (schema.measurements, schema.telemetry):
                    connection.execute(_measured_from(table, self.run.id, warmups))
            self._update(connection, warmup=warmups, warmup_detected=detected)

    @_insisting
    def finish(self, status: RunStatus = "done", *, error: str | None = None) -> None:
        """Record how the run ended.

        A plan's cell is done once: where another try of it was, as that of a worker who was taken
        for dead, this one ends as interrupted.

        Raises:
            ValueError: a failed run without its error.
        """
        if status == "running" or (status == "failed") != bool(error):
            raise ValueError(f"a run cannot end as {status} with error {error!r}")
        values = {
            "status": status,
            "finished_at": now(),
            "error": to_storable(error),
            "generated_text": to_storable(self.generated_text),
        }
        with self._writing() as connection:
            try:
                with connection.begin_nested():
                    self._update(connection, **values)
            except IntegrityError:
                self._update(connection, **values | {"status": "interrupted"})
            if status == "done" and self.run.plan is not None:
                interrupt_tries(connection, self.run.group_id, self.run.session)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """Open a transaction over this run, which must not be finished."""
        location = self._database.location
        with self._database.writing() as connection:
            status = connection.scalar(
                select(schema.runs.c.status).where(self._this_run).with_for_update()
            )
            if status is None:
                raise NotStoredError(location, f"run {self.run.id!r}")
            if status not in _UNFINISHED:
                raise self._conflict(f"it is {status} already")
            yield connection

    @property
    def _this_run(self) -> Any:  # noqa: ANN401
        return schema.runs.c.id == self.run.id

    def _update(self, connection: Connection, **values: object) -> None:
        connection.execute(update(schema.runs).where(self._this_run).values(values))

    def _conflict(self, reason: str) -> RunConflictError:
        return RunConflictError(self._database.location, self.run.id, reason)


def insert_run(connection: Connection, location: str, run: Run) -> None:
    """Insert a run with its measurements.

    Raises:
        RunConflictError: it exists already, or a repetition occurs twice.
    """
    values = {**row_of(run), "writer": this_writer()}
    if run.status == "running" and run.plan is not None:
        interrupt_tries(connection, run.group_id, run.session)
    with _conflicts(location, run.id, "it exists already"):
        connection.execute(insert(schema.runs), values)
    _insert_measurements(connection, location, run.id, run.measurements)


def interrupt_tries(connection: Connection, group_id: str, session: int) -> None:
    """Mark tries of a plan's cell that go on as interrupted: their hosts may be gone.

    Those that live finish all the same.
    """
    runs = schema.runs.c
    tries = schema.of_cells & (runs.group_id == group_id) & (runs.session == session)
    running = update(schema.runs).where(tries & (runs.status == "running"))
    connection.execute(running.values(status="interrupted"))


def insert_artifact(
    connection: Connection, location: str, run_id: str, artifact: ArtifactRecord
) -> None:
    """Insert the name of a kept file.

    Raises:
        RunConflictError: the run has one of that name.
    """
    row = {"run_id": run_id, **artifact.model_dump()}
    with _conflicts(location, run_id, f"an artifact {artifact.name!r} exists already"):
        connection.execute(insert(schema.artifacts), row)


def _insert_measurements(
    connection: Connection, location: str, run_id: str, measurements: Sequence[Measurement]
) -> None:
    rows = [{"run_id": run_id, **measurement.model_dump()} for measurement in measurements]
    if rows:
        with _conflicts(location, run_id, "a repetition of a metric exists already"):
            connection.execute(insert(schema.measurements), rows)


def _measured_from(table: Table, run_id: str, warmups: int) -> Any:  # noqa: ANN401
    return (
        update(table)
        .where(table.c.run_id == run_id, table.c.is_warmup.is_(True))
        .where(table.c.repetition >= warmups)
        .values(is_warmup=False, repetition=table.c.repetition - warmups)
    )


@contextmanager
def _conflicts(location: str, run_id: str, reason: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        raise RunConflictError(location, run_id, reason) from error
