"""Conversion between runs and rows of the database.

Rows are checked like new records: a file from outside is not trusted.
"""

from collections.abc import Callable, Mapping, Sequence
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


class RunParser:
    """Parser of many runs, which share the records that are equal: a container, a device.

    In a history nearly all are: sharing them takes most of the time and memory off reading it.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._known: dict[str, Any] = {}

    def parse(self, row: RowMapping, measured: Sequence[RowMapping] = ()) -> Run:
        """Convert a row, and the rows of its measurements, to a run.

        Raises:
            CorruptRunError: qnnfarm cannot have written it.
        """
        try:
            return self._parse(row, measured)
        except ValidationError as error:
            fault = first_fault(error, Run)
            said = f"{fault.key}: {fault.reason}" if fault.key else fault.reason
            raise CorruptRunError(self._location, str(row["id"]), said) from error
        except (UnknownMetricError, MetricValueError) as error:
            raise CorruptRunError(self._location, str(row["id"]), str(error)) from error

    def _parse(self, row: RowMapping, measured: Sequence[RowMapping]) -> Run:
        values = dict(row)
        if values["status"] == "running" and has_ended(values["writer"]):
            values["status"] = "interrupted"
        return Run(
            **{name: values[name] for name in _PLAIN},
            container=self._shared("container", _container, values),
            device=self._shared("device", _device, values),
            workload=self._shared("workload", _workload, values),
            provenance=self._shared("provenance", _provenance, values),
            origin=self._shared("origin", _origin, values),
            check=self._shared("check", _check, values),
            measurements=tuple(
                Measurement(**{name: m[name] for name in Measurement.model_fields})
                for m in measured
            ),
        )

    def _shared(self, kind: str, make: Callable[[Mapping[str, Any]], Any], values: Any) -> Any:  # noqa: ANN401
        """Return the record of a row; that of an earlier row if the columns are equal."""
        key = kind + repr([values[name] for name in _COLUMNS[kind]])
        if key not in self._known:
            self._known[key] = make(values)
        return self._known[key]


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


_OF_CONTAINER = {"sha256": "container_sha256", "size_bytes": "container_bytes"}
_OF_DEVICE = {name: f"device_{name}" for name in ("serial", "model", "manufacturer")}
_DEFINITION = {name: f"perplexity_{name}" for name in PerplexityDefinition.model_fields}
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "container": tuple(_OF_CONTAINER.get(name, name) for name in ContainerInfo.model_fields),
    "device": tuple(_OF_DEVICE.get(name, name) for name in DeviceInfo.model_fields),
    "workload": (
        *(name for name in Workload.model_fields if name != "perplexity"),
        *_DEFINITION.values(),
    ),
    "provenance": tuple(Provenance.model_fields),
    "origin": tuple(f"origin_{name}" for name in Origin.model_fields),
    "check": ("check_outcome", "check_reason"),
}
"""The columns of each record of a run."""
_PLAIN = tuple(name for name in Run.model_fields if name not in {*_COLUMNS, "measurements"})


def _container(row: Mapping[str, Any]) -> ContainerInfo:
    named = zip(ContainerInfo.model_fields, _COLUMNS["container"], strict=True)
    values: dict[str, Any] = {name: row[column] for name, column in named}
    return ContainerInfo(**values)


def _device(row: Mapping[str, Any]) -> DeviceInfo:
    named = zip(DeviceInfo.model_fields, _COLUMNS["device"], strict=True)
    values: dict[str, Any] = {name: row[column] for name, column in named}
    return DeviceInfo(**values)


def _provenance(row: Mapping[str, Any]) -> Provenance:
    return Provenance(**{name: row[name] for name in Provenance.model_fields})


def _check(row: Mapping[str, Any]) -> OutputCheck:
    return OutputCheck(outcome=row["check_outcome"], reason=row["check_reason"])


def _origin(row: Mapping[str, Any]) -> Origin | None:
    if row["origin_tool"] is None:
        return None
    return Origin(**{name: row[f"origin_{name}"] for name in Origin.model_fields})


def _workload(row: Mapping[str, Any]) -> Workload:
    plain = {name: row[name] for name in Workload.model_fields if name != "perplexity"}
    if row["perplexity_positions"] is None:
        return Workload(**plain)
    definition = PerplexityDefinition(**{name: row[key] for name, key in _DEFINITION.items()})
    return Workload(**plain, perplexity=definition)
