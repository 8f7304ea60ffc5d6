"""Conversion between runs and rows of the database.

Rows are checked like new records: a file from outside is not trusted.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import RowMapping

from buildlib.validation import first_fault
from harness.errors import (
    CorruptRunError,
    MetricValueError,
    TelemetryRecordError,
    UnknownMetricError,
)
from harness.results.provenance import has_ended
from harness.results.records import (
    Artifact,
    ComparisonRecord,
    ContainerInfo,
    DeviceInfo,
    Measurement,
    Origin,
    OutputCheck,
    PerplexityDefinition,
    Provenance,
    RepetitionTelemetry,
    Run,
    Workload,
)
from harness.results.telemetry import unpack


def row_of(run: Run) -> dict[str, Any]:
    """Convert a run to its columns, without the writer."""
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
            | {"group_id", "session", "label", "warmup_detected", "plan", "concurrent_sessions"}
        ),
        "labels": dict(run.labels),
        **{f"origin_{name}": getattr(run.origin, name, None) for name in Origin.model_fields},
        "conditions": [dict(condition) for condition in run.conditions],
        "check_outcome": run.check.outcome,
        "check_reason": run.check.reason,
        **container.model_dump(
            include={"model", "target", "cl", "n_splits", "precision", "parameters"}
        ),
        "container_sha256": container.sha256,
        "container_bytes": container.size_bytes,
        "ars": list(container.ars),
        **device.model_dump(
            include={"soc", "emulator", "dsp_arch", "abi", "android_version"}
            | {"ram_bytes", "os_build", "build_fingerprint"}
        ),
        "clocks": dict(device.clocks),
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


def parse_run(location: str, row: RowMapping, measured: Sequence[RowMapping]) -> Run:
    """Convert a row, and the rows of its measurements, to a run.

    Raises:
        CorruptRunError: qnnfarm cannot have written it.
    """
    try:
        return _parse(row, measured)
    except ValidationError as error:
        fault = first_fault(error, Run)
        said = f"{fault.key}: {fault.reason}" if fault.key else fault.reason
        raise CorruptRunError(location, str(row["id"]), said) from error
    except (UnknownMetricError, MetricValueError) as error:
        raise CorruptRunError(location, str(row["id"]), str(error)) from error


def parse_comparison(location: str, row: RowMapping) -> ComparisonRecord:
    """Convert a row to a comparison.

    Raises:
        CorruptRunError: qnnfarm cannot have written it.
    """
    try:
        return ComparisonRecord.model_validate(dict(row))
    except ValidationError as error:
        fault = first_fault(error, ComparisonRecord)
        raise CorruptRunError(location, str(row["group_id"]), str(fault)) from error
    except UnknownMetricError as error:
        raise CorruptRunError(location, str(row["group_id"]), str(error)) from error


def parse_telemetry(row: RowMapping) -> RepetitionTelemetry:
    """Convert a row of the telemetry of one repetition.

    Raises:
        TelemetryRecordError: qnnfarm cannot have written it.
    """
    samples = row["samples"]
    if not isinstance(samples, bytes):  # SQLite keeps what it is given, whatever the column says
        raise TelemetryRecordError("*", "what is stored is damaged: it is not a binary value")
    return RepetitionTelemetry(row["repetition"], row["is_warmup"], unpack(samples))


def parse_artifact(location: str, row: RowMapping) -> Artifact:
    """Convert a row of an artifact.

    Raises:
        CorruptRunError: qnnfarm cannot have written it.
    """
    try:
        return Artifact(**{name: row[name] for name in Artifact.model_fields})
    except ValidationError as error:
        fault = first_fault(error, Artifact)
        said = f"artifact {fault.key}: {fault.reason}"
        raise CorruptRunError(location, str(row["run_id"]), said) from error


def _parse(row: RowMapping, measured: Sequence[RowMapping]) -> Run:
    status = row["status"]
    if status == "running" and has_ended(row["writer"]):
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
            size_bytes=row["container_bytes"],
            parameters=row["parameters"],
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
            ram_bytes=row["ram_bytes"],
            os_build=row["os_build"],
            build_fingerprint=row["build_fingerprint"],
            clocks=row["clocks"],
        ),
        workload=_workload(row),
        provenance=Provenance(**{name: row[name] for name in Provenance.model_fields}),
        generated_text=row["generated_text"],
        group_id=row["group_id"],
        session=row["session"],
        label=row["label"],
        labels=row["labels"],
        plan=row["plan"],
        concurrent_sessions=row["concurrent_sessions"],
        origin=_origin(row),
        conditions=row["conditions"],
        check=OutputCheck(outcome=row["check_outcome"], reason=row["check_reason"]),
        warmup_detected=row["warmup_detected"],
        measurements=tuple(
            Measurement(**{name: m[name] for name in Measurement.model_fields}) for m in measured
        ),
    )


def _origin(row: RowMapping) -> Origin | None:
    if row["origin_tool"] is None:
        return None
    return Origin(**{name: row[f"origin_{name}"] for name in Origin.model_fields})


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
