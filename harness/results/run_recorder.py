"""Recording of one run into the store while it goes on."""

import gzip
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Column, Connection, Table, insert, select, update
from sqlalchemy.exc import IntegrityError

from harness.errors import NotStoredError, RunConflictError
from harness.results import schema
from harness.results.artifacts import ArtifactFolder
from harness.results.database import ResultsDatabase
from harness.results.metrics import Measurement
from harness.results.provenance import this_writer
from harness.results.records import (
    MAX_CONDITIONS,
    ArtifactKind,
    ArtifactRecord,
    CheckOutcome,
    Condition,
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
TRACES = "traces.jsonl.gz"
"""Artifact of a traced run: a line with the stages of its deployment, then one for each process."""
_UNFINISHED = ("running", "interrupted")


class RunRecorder:
    """Streams one run that has begun into the store.

    Each method is one transaction, which `ResultsDatabase.insist` repeats if the server restarts.
    It raises `NotStoredError` if there is no such run, and `RunConflictError` if the run is
    finished, or already has the values.

    Attributes:
        run: as it began.
        generated_text: kept when the run finishes.
        profiles, traces: the runtime's recordings of each process, in their order, which a workload
            may keep with the run; empty without any.
    """

    def __init__(self, database: ResultsDatabase, run: Run) -> None:
        self._database = database
        self._location = database.location
        self.run = run
        self.generated_text: str | None = None
        self.profiles: list[str] = []
        self.traces: list[str] = []

    def add(self, *measurements: Measurement) -> None:
        """Add measurements, such as those of one repetition."""
        self._write(
            lambda connection: _insert_measurements(
                connection, self._location, self.run.id, measurements
            )
        )

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

    def add_library_versions(self, versions: Mapping[str, str]) -> None:
        """Add versions that only the run could find out, such as Genie's own."""
        new = {str(to_name(name)): str(to_name(one)) for name, one in versions.items()}

        def write(connection: Connection) -> None:
            versions_now = dict(self._read(connection, schema.runs.c.library_versions))
            for name, version in new.items():
                if versions_now.setdefault(name, version) != version:
                    reason = f"it has version {versions_now[name]} of {name}, not {version}"
                    raise self._conflict(reason)
            self._update(connection, library_versions=versions_now)

        self._write(write)

    def add_telemetry(
        self, series: Sequence[TelemetrySeries], *, repetition: int, is_warmup: bool = False
    ) -> None:
        """Add the telemetry of one repetition; an empty one is not stored."""
        if not series:
            return
        row = {
            "run_id": self.run.id,
            "is_warmup": is_warmup,
            "repetition": repetition,
            "samples": pack(series),  # takes a while, so it is done before locking the database
        }

        def write(connection: Connection) -> None:
            reason = "telemetry of that repetition exists already"
            with _conflicts(self._location, self.run.id, reason):
                connection.execute(insert(schema.telemetry).values(row))

        self._write(write)

    def add_artifact(
        self, name: str, content: bytes, kind: ArtifactKind = "other"
    ) -> ArtifactRecord:
        """Keep a file with the run: its content beside the database, its name in it."""
        sha256 = ArtifactFolder.of(self._location).put(content)
        artifact = ArtifactRecord(name=name, kind=kind, sha256=sha256, size_bytes=len(content))
        self._write(
            lambda connection: insert_artifact(connection, self._location, self.run.id, artifact)
        )
        return artifact

    def add_traces(self, stages: Iterable[tuple[str, float]]) -> None:
        """Keep `traces`, each a JSON document without line breaks, as the artifact `TRACES`.

        Args:
            stages: of the deployment, with their seconds.
        """
        lines = [json.dumps({"stages": [list(stage) for stage in stages]}), *self.traces]
        text = "".join(f"{line}\n" for line in lines)
        self.add_artifact(TRACES, gzip.compress(text.encode(), mtime=0), "trace")

    def set_runner_sha256(self, sha256: str) -> None:
        """Record the hash of the program that runs on the device."""
        self._write(lambda connection: self._update(connection, runner_sha256=sha256))

    def set_concurrency(self, sessions: int) -> None:
        """Record the most sessions that ran at once on the host, this one included."""
        self._write(lambda connection: self._update(connection, concurrent_sessions=sessions))

    def add_conditions(self, conditions: Iterable[Condition]) -> None:
        """Add preparations of the device before the run."""
        new = list(_CONDITIONS.validate_python(tuple(conditions)))

        def write(connection: Connection) -> None:
            before = self._read(connection, schema.runs.c.conditions)
            if before[len(before) - len(new) :] == new:
                return  # a write without an answer was kept
            if len(before) + len(new) > MAX_CONDITIONS:
                raise self._conflict(f"more than {MAX_CONDITIONS} conditions")
            self._update(connection, conditions=[*before, *new])

        self._write(write)

    def set_check(self, outcome: CheckOutcome, reason: str = "") -> None:
        """Record the outcome of the output check; a run whose check failed must fail."""
        check = OutputCheck(outcome=outcome, reason=reason)
        values = {"check_outcome": check.outcome, "check_reason": check.reason}
        self._write(lambda connection: self._update(connection, **values))

    def settle_warmup(self, warmups: int, *, detected: bool) -> None:
        """Turn all warm-ups from number `warmups` on into measured repetitions.

        While warm-up is being detected, every repetition is stored as a warm-up.
        """

        def write(connection: Connection) -> None:
            with _conflicts(self._location, self.run.id, "it has measured repetitions already"):
                for table in (schema.measurements, schema.telemetry):
                    connection.execute(_measured_from(table, self.run.id, warmups))
            self._update(connection, warmup=warmups, warmup_detected=detected)

        self._write(write)

    def finish(self, status: RunStatus = "done", *, error: str | None = None) -> None:
        """Record how the run ended.

        A plan's cell is done once: where another try of it was, as after a worker was taken for
        dead, this one ends as interrupted.
        """
        if status == "running" or (status == "failed") != bool(error):
            raise ValueError(f"a run cannot end as {status} with error {error!r}")
        values = {
            "status": status,
            "finished_at": now(),
            "error": to_storable(error),
            "generated_text": to_storable(self.generated_text),
        }

        def write(connection: Connection) -> None:
            try:
                with connection.begin_nested():
                    self._update(connection, **values)
            except IntegrityError:
                self._update(connection, **values | {"status": "interrupted"})
            if status == "done" and self.run.plan is not None:
                interrupt_tries(connection, self.run.group_id, self.run.session)

        self._write(write)

    def _write(self, write: Callable[[Connection], None]) -> None:
        """Write in a transaction over this run, which must not be finished."""

        def write_unfinished(connection: Connection) -> None:
            status = connection.scalar(
                select(schema.runs.c.status).where(self._this_run).with_for_update()
            )
            if status is None:
                raise NotStoredError(self._location, f"run {self.run.id!r}")
            if status not in _UNFINISHED:
                raise self._conflict(f"it is {status} already")
            write(connection)

        self._database.insist(write_unfinished)

    @property
    def _this_run(self) -> Any:  # noqa: ANN401
        return schema.runs.c.id == self.run.id

    def _read(self, connection: Connection, column: Column[Any]) -> Any:  # noqa: ANN401
        return connection.execute(select(column).where(self._this_run)).scalar_one()

    def _update(self, connection: Connection, **values: object) -> None:
        connection.execute(update(schema.runs).where(self._this_run).values(values))

    def _conflict(self, reason: str) -> RunConflictError:
        return RunConflictError(self._location, self.run.id, reason)


def insert_run(connection: Connection, location: str, run: Run) -> None:
    """Insert a run with its measurements."""
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
    running_tries = update(schema.runs).where(tries & (runs.status == "running"))
    connection.execute(running_tries.values(status="interrupted"))


def insert_artifact(
    connection: Connection, location: str, run_id: str, artifact: ArtifactRecord
) -> None:
    """Insert the name of a kept file."""
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
