"""Results as pandas frames, for notebooks, statistics and exports.

`harness.results.frames("results.db")` reads three tidy frames. Their columns are those of the
database, under the same names and in the same units, so that a column which is added to the schema
appears here too; docs/analysis.md lists them.
"""

import io
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import JSON, Boolean, Connection, Double, Integer, Select, Table, select

from harness.errors import CorruptRunError, TelemetryRecordError, WrongUseError
from harness.results import schema
from harness.results.database import refuse_unreadable_rows
from harness.results.metrics import METRICS, unknown_metric
from harness.results.provenance import has_ended
from harness.results.records import RUNTIME, runtime_of
from harness.results.rows import parse_telemetry
from harness.results.store import EVERYTHING, ResultsStore, RunFilter, select_runs
from harness.words import csv_cell

try:
    import pandas as pd
except ImportError as error:
    reason = "tables need pandas, which is not installed: pip install 'qnnfarm[pandas]'"
    raise WrongUseError(reason) from error

_HIDDEN = frozenset({"writer"})
_LABELS = "labels"
_REPETITION = ["run_id", "is_warmup", "repetition"]
_SAMPLE = ["run_id", "is_warmup", "repetition", "channel", "unit", "t_s", "value"]


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """Results of the runs that match a filter, oldest first.

    Attributes:
        repetitions: a row for each repetition of a run, warm-ups too, with a column for each metric
            that occurs, in its unit, and all columns of its run. A value that is measured once a
            session (a perplexity, a push) stands in the row of its first repetition. The requested
            number of prompt tokens is `prompt_tokens_requested`, the measured one `prompt_tokens`.
        runs: a row for each run, failed ones too. `labels` are columns `labels.KEY`; other mappings
            are JSON text.
        telemetry: a row for each sample: channel, unit, seconds since the runner began, value.
            Empty unless asked for.
    """

    repetitions: pd.DataFrame
    runs: pd.DataFrame
    telemetry: pd.DataFrame


def frames(db: str | Path, wanted: RunFilter = EVERYTHING, *, telemetry: bool = False) -> Frames:
    """Read results as pandas frames.

    Args:
        db: a SQLite file, or the URL of a database on a server; it is only read.
        wanted: which runs; by default all.
        telemetry: whether to read samples too, which are most of the bytes.
    """
    __tracebackhide__ = True  # pytest would show the location, and so its password
    with ResultsStore.open(db, create=False) as store:
        location = store.location
        # A filter by status or number depends on which writers live, which SQL cannot tell.
        query = select_runs(wanted)
        by_run = wanted.container is not None or bool(wanted.labels)
        run_ids = {run.id for run in store.list_runs(wanted)} if by_run else None
        with store.database.reading() as connection, refuse_unreadable_rows(location):
            runs = _read_runs(connection, query, wanted, run_ids)
            ids = runs["id"].tolist()
            measurements = _read_measurements(connection, query, ids, location)
            samples = _read_telemetry(connection, location, query, ids) if telemetry else []
    return Frames(_join(measurements, runs), runs, pd.DataFrame(samples, columns=_SAMPLE))


def encode(frame: pd.DataFrame, suffix: Literal["parquet", "csv", "jsonl"]) -> bytes:
    """Write a frame as a file of a format.

    Raises:
        WrongUseError: pyarrow, which Parquet needs, is not installed.
    """
    if suffix == "parquet":
        buffer = io.BytesIO()
        try:
            frame.to_parquet(buffer, engine="pyarrow", index=False)
        except ImportError as error:
            reason = "Parquet needs pyarrow, which is not installed"
            raise WrongUseError(f"{reason}: pip install 'qnnfarm[parquet]'") from error
        return buffer.getvalue()
    if suffix == "csv":
        text = frame.select_dtypes(["object", "string"]).columns
        frame = frame.assign(**{str(name): frame[name].map(csv_cell) for name in text})
        frame = frame.rename(columns=csv_cell)
        return frame.to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S.%fZ").encode()
    if frame.empty:
        return b""  # pandas would write a blank line
    lines = frame.to_json(orient="records", lines=True, date_format="iso", date_unit="us")
    return lines.encode()


def _join(measured: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return repetitions with the columns of their runs, in the order of the runs."""
    new_names = {"id": "run_id", "prompt_tokens": "prompt_tokens_requested"}
    numbered_runs = runs.rename(columns=new_names).assign(_order=range(len(runs)))
    rows = measured.merge(numbered_runs, on="run_id")
    by, ascending = ["_order", "is_warmup", "repetition"], [True, False, True]
    rows = rows.sort_values(by, ascending=ascending, ignore_index=True)
    return rows.drop(columns="_order")


def _read_runs(
    connection: Connection, query: Select[Any], wanted: RunFilter, chosen: AbstractSet[str] | None
) -> pd.DataFrame:
    """Return the runs of a query; only the chosen ones, where SQL cannot choose."""
    rows = [dict(row) for row in connection.execute(query).mappings()]
    for row in rows:
        if row["status"] == "running" and has_ended(row["writer"], row["created_at"]):
            row["status"] = "interrupted"
    rows = [
        row
        for row in rows
        if wanted.status in {None, row["status"]} and (chosen is None or row["id"] in chosen)
    ]
    rows = rows[: wanted.newest][::-1]
    columns = [column for column in schema.runs.columns if column.name not in _HIDDEN]
    series = {
        column.name: _series(schema.runs, column.name, [row[column.name] for row in rows])
        for column in columns
        if column.name != _LABELS
    }
    names = [None if row["origin_tool"] else runtime_of(row["sampler"]) for row in rows]
    series[RUNTIME] = pd.Series(names, dtype="string")
    return pd.DataFrame({**series, **_label_columns([row[_LABELS] for row in rows])})


def _label_columns(labels: Sequence[Mapping[str, str]]) -> "dict[str, pd.Series[str]]":
    keys = sorted({key for each in labels for key in each})
    return {
        f"{_LABELS}.{key}": pd.Series([each.get(key) for each in labels], dtype="string")
        for key in keys
    }


def _series(table: Table, name: str, values: Sequence[Any]) -> "pd.Series[Any]":
    """Return a column in pandas' type for the database's; missing values stay missing."""
    kind = table.c[name].type
    if isinstance(kind, JSON):
        texts = [
            None if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False)
            for value in values
        ]
        return pd.Series(texts, dtype="string")
    if isinstance(kind, schema.UtcDateTime):
        return pd.Series(pd.to_datetime(list(values), utc=True), dtype="datetime64[us, UTC]")
    types = ((Boolean, "boolean"), (Double, "float64"), (Integer, "Int64"))
    dtype = next((dtype for sql, dtype in types if isinstance(kind, sql)), "string")
    return pd.Series(list(values), dtype=dtype)


def _read_measurements(
    connection: Connection, query: Select[Any], ids: Sequence[str], location: str
) -> pd.DataFrame:
    """Return a row a repetition, a column for each metric that occurs, in the registry's order."""
    table = schema.measurements
    matching = query.with_only_columns(schema.runs.c.id).subquery()
    rows = connection.execute(select(table).join(matching, table.c.run_id == matching.c.id)).all()
    long = pd.DataFrame(rows, columns=[column.name for column in table.columns])
    strangers = set(long["metric"].unique()) - METRICS.keys()
    if strangers:
        cause = unknown_metric(str(min(strangers)), METRICS)
        run_id = str(long.loc[long["metric"].isin(strangers), "run_id"].iloc[0])
        raise CorruptRunError(location, run_id, str(cause))
    long = long[long["run_id"].isin(ids)]
    long["value"] = pd.to_numeric(long["value"])
    wide = long.set_index([*_REPETITION, "metric"])["value"].unstack("metric")
    wide = wide.reindex(columns=[key for key in METRICS if key in wide.columns])
    wide.columns.name = None
    wide = wide.reset_index()
    types = {"run_id": "string", "is_warmup": "boolean", "repetition": "Int64"}
    return wide.astype(types)


def _read_telemetry(
    connection: Connection, location: str, query: Select[Any], ids: Sequence[str]
) -> list[tuple[object, ...]]:
    table = schema.telemetry
    matching = query.with_only_columns(schema.runs.c.id).subquery()
    query_in_order = (
        select(table)
        .join(matching, table.c.run_id == matching.c.id)
        .order_by(table.c.run_id, table.c.is_warmup.desc(), table.c.repetition)
    )
    run_ids = set(ids)
    samples: list[tuple[object, ...]] = []
    for row in connection.execute(query_in_order).mappings():
        if row["run_id"] not in run_ids:
            continue
        try:
            repetition = parse_telemetry(row)
        except TelemetryRecordError as error:
            raise CorruptRunError(location, row["run_id"], str(error)) from error
        for series in repetition.series:
            where = (row["run_id"], repetition.is_warmup, repetition.repetition)
            samples += [
                (*where, series.channel, series.unit, moment, value)
                for moment, value in zip(series.t_s, series.values, strict=True)
            ]
    return samples
