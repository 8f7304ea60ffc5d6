"""Runs into the database. Every function is part of the caller's transaction."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from harness.errors import RunConflictError, UnknownRunError
from harness.results import schema, writer
from harness.results.records import (
    MOST_CONDITIONS,
    Condition,
    Measurement,
    OutputCheck,
    Run,
    RunStatus,
    storable,
)

_UNFINISHED = ("running", "interrupted")


def insert_run(connection: Connection, location: str, run: Run) -> None:
    """Write a run with the measurements that it has.

    Raises:
        RunConflictError: there is a run of that identifier, or a repetition is there twice.
    """
    try:
        connection.execute(insert(schema.runs).values(**_row(run), writer=writer.this_writer()))
    except IntegrityError as error:
        raise RunConflictError(location, run.id, "it is there already") from error
    _insert_measurements(connection, location, run.id, run.measurements)


def add_measurements(
    connection: Connection, location: str, run_id: str, measurements: Sequence[Measurement]
) -> None:
    """Add measurements to a run that is not finished.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: the run is finished, or a repetition is there already.
    """
    _require_unfinished(connection, location, run_id)
    _insert_measurements(connection, location, run_id, measurements)


def add_library_versions(
    connection: Connection, location: str, run_id: str, versions: Mapping[str, str]
) -> None:
    """Add to the library versions of a run that is not finished.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: the run is finished, or has another version of the same library.
    """
    _require_unfinished(connection, location, run_id)
    column, this_run = schema.runs.c.library_versions, schema.runs.c.id == run_id
    found = dict(connection.execute(select(column).where(this_run)).scalar_one())
    for name, version in versions.items():
        if found.setdefault(str(storable(name)), str(storable(version))) != storable(version):
            reason = f"it has version {found[name]} of {name}, not {version}"
            raise RunConflictError(location, run_id, reason)
    connection.execute(update(schema.runs).where(this_run).values(library_versions=found))


def add_telemetry(
    connection: Connection,
    location: str,
    run_id: str,
    samples: bytes,
    *,
    repetition: int,
    is_warmup: bool,
) -> None:
    """Add one repetition's telemetry, packed, to a run that is not finished.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: the run is finished, or the repetition's telemetry is there already.
    """
    _require_unfinished(connection, location, run_id)
    row = {"run_id": run_id, "is_warmup": is_warmup, "repetition": repetition}
    try:
        connection.execute(insert(schema.telemetry).values(**row, samples=samples))
    except IntegrityError as error:
        reason = "telemetry of that repetition is there already"
        raise RunConflictError(location, run_id, reason) from error


def add_conditions(
    connection: Connection, location: str, run_id: str, conditions: Sequence[Condition]
) -> None:
    """Add to the conditions of a run that is not finished.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: the run is finished, or has too many conditions.
    """
    _require_unfinished(connection, location, run_id)
    column, this_run = schema.runs.c.conditions, schema.runs.c.id == run_id
    found = [*connection.execute(select(column).where(this_run)).scalar_one(), *conditions]
    if len(found) > MOST_CONDITIONS:
        raise RunConflictError(location, run_id, f"more than {MOST_CONDITIONS} conditions")
    connection.execute(update(schema.runs).where(this_run).values(conditions=found))


def set_check(connection: Connection, location: str, run_id: str, check: OutputCheck) -> None:
    """Say what came of the check of a run's output.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: the run is finished.
    """
    _require_unfinished(connection, location, run_id)
    connection.execute(
        update(schema.runs)
        .where(schema.runs.c.id == run_id)
        .values(check_outcome=check.outcome, check_reason=check.reason)
    )


def settle_warmup(
    connection: Connection, location: str, run_id: str, *, warmups: int, detected: bool
) -> None:
    """Make measured repetitions of all warm-ups from number `warmups` on.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: the run is finished, or has such measured repetitions already.
    """
    _require_unfinished(connection, location, run_id)
    try:
        for table in (schema.measurements, schema.telemetry):
            connection.execute(
                update(table)
                .where(table.c.run_id == run_id, table.c.is_warmup.is_(True))
                .where(table.c.repetition >= warmups)
                .values(is_warmup=False, repetition=table.c.repetition - warmups)
            )
    except IntegrityError as error:
        reason = "it has measured repetitions already"
        raise RunConflictError(location, run_id, reason) from error
    connection.execute(
        update(schema.runs)
        .where(schema.runs.c.id == run_id)
        .values(warmup=warmups, warmup_detected=detected)
    )


def finish_run(
    connection: Connection,
    location: str,
    run_id: str,
    *,
    status: RunStatus,
    finished_at: datetime,
    error: str | None,
    generated_text: str | None,
) -> None:
    """Say how a run ended.

    Raises:
        UnknownRunError: there is no such run.
        RunConflictError: it is finished already.
    """
    _require_unfinished(connection, location, run_id)
    connection.execute(
        update(schema.runs)
        .where(schema.runs.c.id == run_id)
        .values(
            status=status,
            finished_at=finished_at,
            error=storable(error),
            generated_text=storable(generated_text),
        )
    )


def mark_interrupted(connection: Connection) -> None:
    """Mark the running runs of processes that are gone."""
    table = schema.runs
    running = connection.execute(
        select(table.c.id, table.c.writer).where(table.c.status == "running")
    )
    for run_id, mark in running.all():
        if writer.is_gone(mark):
            connection.execute(
                # Its last words may have been written since we looked.
                update(table)
                .where(table.c.id == run_id, table.c.status == "running")
                .values(status="interrupted")
            )


def _require_unfinished(connection: Connection, location: str, run_id: str) -> None:
    found = (
        select(schema.runs.c.status).where(schema.runs.c.id == storable(run_id)).with_for_update()
    )
    status = connection.scalar(found)
    if status is None:
        raise UnknownRunError(location, run_id)
    if status not in _UNFINISHED:
        raise RunConflictError(location, run_id, f"it is {status} already")


def _insert_measurements(
    connection: Connection, location: str, run_id: str, measurements: Sequence[Measurement]
) -> None:
    rows = [{"run_id": run_id, **measurement.model_dump()} for measurement in measurements]
    if not rows:
        return
    try:
        connection.execute(insert(schema.measurements), rows)
    except IntegrityError as error:
        reason = "a repetition of a metric is there already"
        raise RunConflictError(location, run_id, reason) from error


def _row(run: Run) -> dict[str, Any]:
    container, device, workload, source = (
        run.container,
        run.device,
        run.workload,
        run.provenance,
    )
    definition = workload.perplexity
    return {
        **run.model_dump(
            include={"id", "created_at", "finished_at", "kind", "status", "error", "generated_text"}
            | {"group_id", "session", "label", "warmup_detected"}
        ),
        "conditions": [dict(condition) for condition in run.conditions],
        "check_outcome": run.check.outcome,
        "check_reason": run.check.reason,
        **container.model_dump(include={"model", "target", "cl", "n_splits", "precision"}),
        "container_sha256": container.sha256,
        "ars": list(container.ars),
        **device.model_dump(include={"soc", "emulator", "dsp_arch", "abi", "android_version"}),
        "device_serial": device.serial,
        "device_model": device.model,
        "device_manufacturer": device.manufacturer,
        **workload.model_dump(exclude={"perplexity", "sampler"}),
        "sampler": dict(workload.sampler),
        "perplexity_positions": definition.positions if definition else None,
        "perplexity_windows": definition.windows if definition else None,
        "perplexity_tokens": definition.tokens if definition else None,
        **source.model_dump(exclude={"toolchain_versions", "library_versions"}),
        "toolchain_versions": dict(source.toolchain_versions),
        "library_versions": dict(source.library_versions),
    }
