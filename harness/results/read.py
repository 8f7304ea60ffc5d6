"""Runs out of the database.

No file from outside is trusted: what is read is checked like what is written.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, RowMapping, Select, select
from sqlalchemy.exc import DataError

from harness.errors import (
    CorruptRunError,
    MetricValueError,
    NotAStoreError,
    TelemetryRecordError,
    UnknownMetricError,
    UnknownRunError,
)
from harness.results import schema, writer
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    Measurement,
    OutputCheck,
    PerplexityDefinition,
    Provenance,
    RepetitionTelemetry,
    Run,
    RunKind,
    RunStatus,
    TelemetrySeries,
    Workload,
    storable,
)
from harness.results.telemetry import unpack


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to read; what is None does not matter.

    Attributes:
        since: created then or later; with its time zone.
        newest: at most so many, the newest ones.
    """

    kind: RunKind | None = None
    status: RunStatus | None = None
    model: str | None = None
    target: str | None = None
    soc: str | None = None
    emulator: bool | None = None
    container_sha256: str | None = None
    group_id: str | None = None
    since: datetime | None = None
    newest: int | None = None


def list_runs(connection: Connection, location: str, wanted: RunFilter) -> tuple[Run, ...]:
    """The wanted runs, oldest first.

    Raises:
        CorruptRunError: one of them cannot have been written by qnnfarm.
    """
    rows, measured = _fetch(connection, location, _chosen(wanted))
    runs = (_run(location, row, measured.get(row["id"], ())) for row in rows)
    fitting = [run for run in runs if wanted.status in {None, run.status}]
    return tuple(reversed(fitting[: wanted.newest]))


def get_run(connection: Connection, location: str, run_id: str) -> Run:
    """One run.

    Raises:
        UnknownRunError: there is none of that identifier.
        CorruptRunError: it cannot have been written by qnnfarm.
    """
    chosen = select(schema.runs).where(schema.runs.c.id == storable(run_id))
    rows, measured = _fetch(connection, location, chosen)
    if not rows:
        raise UnknownRunError(location, run_id)
    return _run(location, rows[0], measured.get(run_id, ()))


def telemetry(
    connection: Connection, location: str, run_id: str
) -> tuple[RepetitionTelemetry, ...]:
    """A run's telemetry, warm-ups first, then in the order of repetitions.

    Raises:
        UnknownRunError: there is no run of that identifier.
        CorruptRunError: what is stored cannot have been written by qnnfarm.
    """
    this_run = schema.runs.c.id == storable(run_id)
    if connection.scalar(select(schema.runs.c.id).where(this_run)) is None:
        raise UnknownRunError(location, run_id)
    table = schema.telemetry
    rows = connection.execute(
        select(table)
        .where(table.c.run_id == run_id)
        .order_by(table.c.is_warmup.desc(), table.c.repetition)
    )
    try:
        return tuple(
            RepetitionTelemetry(row["repetition"], row["is_warmup"], _unpacked(row["samples"]))
            for row in rows.mappings()
        )
    except TelemetryRecordError as error:
        raise CorruptRunError(location, run_id, str(error)) from error


def with_telemetry(connection: Connection, newest: int) -> frozenset[str]:
    """The newest runs that have telemetry, so many at most."""
    table, runs = schema.telemetry, schema.runs
    has_some = select(table.c.run_id).where(table.c.run_id == runs.c.id).exists()
    found = select(runs.c.id).where(has_some)
    ordered = found.order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(newest)
    return frozenset(connection.scalars(ordered))


def _unpacked(samples: object) -> tuple[TelemetrySeries, ...]:
    if not isinstance(samples, bytes):  # SQLite keeps what it is given, whatever the column says
        raise TelemetryRecordError("*", "what is stored is damaged: it is no binary value")
    return unpack(samples)


def _chosen(wanted: RunFilter) -> Select[Any]:
    table = schema.runs
    query = select(table).order_by(table.c.created_at.desc(), table.c.id.desc())
    for column in ("kind", "model", "target", "soc", "emulator", "container_sha256", "group_id"):
        value = getattr(wanted, column)
        if value is not None:
            query = query.where(table.c[column] == storable(value))
    # An interrupted run is stored as running until the next writer comes by.
    unsure = wanted.status in {"interrupted", "running"}
    if wanted.status is not None:
        stored = {wanted.status, "running"} if unsure else {wanted.status}
        query = query.where(table.c.status.in_(sorted(stored)))
    if wanted.since is not None:
        query = query.where(table.c.created_at >= wanted.since)
    return query if unsure or wanted.newest is None else query.limit(wanted.newest)


def _fetch(
    connection: Connection, location: str, chosen: Select[Any]
) -> tuple[Sequence[RowMapping], Mapping[str, Sequence[RowMapping]]]:
    try:
        return connection.execute(chosen).mappings().all(), _measurements(connection, chosen)
    except (ValueError, TypeError) as error:  # a column's text is no JSON or no time
        raise NotAStoreError(location, f"a row cannot be read: {error}") from error
    except DataError as error:  # PostgreSQL has times that Python has not
        raise NotAStoreError(location, f"a row cannot be read: {error.orig}") from error


def _measurements(
    connection: Connection, chosen: Select[Any]
) -> Mapping[str, Sequence[RowMapping]]:
    table = schema.measurements
    ids = chosen.with_only_columns(schema.runs.c.id).subquery()
    query = (
        select(table)
        .join(ids, table.c.run_id == ids.c.id)
        .order_by(table.c.run_id, table.c.metric, table.c.is_warmup.desc(), table.c.repetition)
    )
    grouped = defaultdict[str, list[RowMapping]](list)
    for row in connection.execute(query).mappings():
        grouped[row["run_id"]].append(row)
    return grouped


def _run(location: str, row: RowMapping, measured: Sequence[RowMapping]) -> Run:
    try:
        return _parse(row, measured)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptRunError(location, str(row["id"]), f"{where}: {first['msg']}") from error
    except (UnknownMetricError, MetricValueError) as error:
        raise CorruptRunError(location, str(row["id"]), str(error)) from error


def _parse(row: RowMapping, measured: Sequence[RowMapping]) -> Run:
    status = row["status"]
    if status == "running" and writer.is_gone(row["writer"]):
        status = "interrupted"
    return Run(
        id=row["id"],
        created_at=row["created_at"],
        finished_at=row["finished_at"],
        kind=row["kind"],
        status=status,
        error=row["error"],
        container=ContainerInfo(
            model=row["model"],
            sha256=row["container_sha256"],
            target=row["target"],
            ars=row["ars"],
            cl=row["cl"],
            n_splits=row["n_splits"],
            precision=row["precision"],
        ),
        device=DeviceInfo(
            serial=row["device_serial"],
            soc=row["soc"],
            emulator=row["emulator"],
            model=row["device_model"],
            manufacturer=row["device_manufacturer"],
            dsp_arch=row["dsp_arch"],
            abi=row["abi"],
            android_version=row["android_version"],
        ),
        workload=_workload(row),
        provenance=Provenance(**{name: row[name] for name in Provenance.model_fields}),
        generated_text=row["generated_text"],
        group_id=row["group_id"],
        session=row["session"],
        label=row["label"],
        conditions=row["conditions"],
        check=OutputCheck(outcome=row["check_outcome"], reason=row["check_reason"]),
        warmup_detected=row["warmup_detected"],
        measurements=tuple(
            Measurement(**{name: m[name] for name in Measurement.model_fields}) for m in measured
        ),
    )


def _workload(row: RowMapping) -> Workload:
    plain = {name: row[name] for name in Workload.model_fields if name != "perplexity"}
    if row["perplexity_positions"] is None:
        return Workload(**plain)
    definition = PerplexityDefinition(
        positions=row["perplexity_positions"],
        windows=row["perplexity_windows"],
        tokens=row["perplexity_tokens"],
    )
    return Workload(**plain, perplexity=definition)
