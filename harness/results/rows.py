"""Conversion between runs and rows of the database.

Rows are checked like new records: a file from outside is not trusted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from pydantic import BaseModel, ValidationError
from sqlalchemy import RowMapping

from buildlib.validation import first_fault
from harness.errors import CorruptRunError, MetricError, TelemetryRecordError
from harness.results import schema
from harness.results.identity import Subject
from harness.results.metrics import Measurement
from harness.results.provenance import has_ended
from harness.results.records import ArtifactRecord, ComparisonRecord, RepetitionTelemetry, Run
from harness.results.schema import RecordLayout
from harness.results.telemetry import unpack


def row_of(run: Run) -> dict[str, Any]:
    """Convert a run to its columns, without the writer."""
    columns = dict(_flatten(schema.RUN, run.model_dump(exclude={"measurements"})))
    return columns | {"subject": Subject.of(run).id}


def _flatten(layout: RecordLayout, values: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    for field, column in layout.columns.items():
        yield column.name, None if values is None else values[field]
    for field, inner in layout.records.items():
        yield from _flatten(inner, None if values is None else values[field])


@contextmanager
def _checked(location: str, identifier: object, record: type[BaseModel]) -> Iterator[None]:
    """Raise `CorruptRunError` for values that a record cannot have."""
    try:
        yield
    except ValidationError as error:
        fault = first_fault(error, record)
        text = f"{fault.key}: {fault.reason}" if fault.key else fault.reason
        raise CorruptRunError(location, str(identifier), text) from error
    except MetricError as error:
        raise CorruptRunError(location, str(identifier), str(error)) from error


class RunParser:
    """Parser of many runs, which share the records that are equal: a container, a device.

    In a history nearly all are: sharing them takes most of the time and memory off reading it.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._known: dict[tuple[RecordLayout, str], Any] = {}

    def parse(self, row: RowMapping, measured: Sequence[RowMapping] = ()) -> Run:
        """Convert a row, and the rows of its measurements, to a run."""
        with _checked(self._location, row["id"], Run):
            return self._parse(row, measured)

    def _parse(self, row: RowMapping, measured: Sequence[RowMapping]) -> Run:
        values = dict(zip(row.keys(), row.values(), strict=True))  # faster than dict(row)
        if values["status"] == "running" and has_ended(values["writer"], values["created_at"]):
            values["status"] = "interrupted"
        run = Run(
            **dict(zip(schema.RUN.columns, _OWN(values), strict=True)),
            **{field: self._shared(inner, get(values), values) for field, inner, get in _RECORDS},
            measurements=tuple(
                Measurement(**{name: m[name] for name in Measurement.model_fields})
                for m in measured
            ),
        )
        # One set for all of them: it is half the memory of a run.
        object.__setattr__(run, "__pydantic_fields_set__", _ALL_SET)
        return run

    def _shared(
        self, layout: RecordLayout, columns: tuple[Any, ...], values: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401
        """Return the record of a row; that of an earlier row if the columns are equal."""
        key = layout, repr(columns)
        if key not in self._known:
            self._known[key] = _record(layout, values)
        return self._known[key]


def _record(layout: RecordLayout, values: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Make a record of its columns; None if all are empty."""
    if all(values[name] is None for name in layout.names):
        return None
    plain = {field: values[column.name] for field, column in layout.columns.items()}
    return layout.record(
        **plain, **{field: _record(inner, values) for field, inner in layout.records.items()}
    )


_OWN = itemgetter(*(column.name for column in schema.RUN.columns.values()))
_RECORDS = tuple(
    (field, layout, itemgetter(*layout.names)) for field, layout in schema.RUN.records.items()
)
_ALL_SET = set(Run.model_fields)


def parse_comparison(location: str, row: RowMapping) -> ComparisonRecord:
    """Convert a row to a comparison."""
    with _checked(location, row["group_id"], ComparisonRecord):
        return ComparisonRecord.model_validate(dict(row))


def parse_telemetry(row: RowMapping) -> RepetitionTelemetry:
    """Convert a row of the telemetry of one repetition."""
    samples = row["samples"]
    if not isinstance(samples, bytes):  # SQLite keeps what it is given, whatever the column says
        raise TelemetryRecordError("*", "what is stored is damaged: it is not a binary value")
    return RepetitionTelemetry(row["repetition"], row["is_warmup"], unpack(samples))


def parse_artifact(location: str, row: RowMapping) -> ArtifactRecord:
    """Convert a row of an artifact."""
    with _checked(location, row["run_id"], ArtifactRecord):
        return ArtifactRecord(**{name: row[name] for name in ArtifactRecord.model_fields})
