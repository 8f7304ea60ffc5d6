"""Published results: runs without what names people, places and single devices.

What is published is a row for each repetition, as `harness.results.frames` has them. Serials and
hosts are numbered, paths and addresses are cut out of all texts, and prompts, answers, plans and
branches are left out; names that a user gave (models, labels, cells) stay.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import JSON, Boolean, Column, Double, Integer, Text

from harness.errors import CorruptRunError, HostFileError
from harness.results import schema
from harness.results.metrics import METRICS
from harness.results.records import Run
from harness.results.rows import RunParser
from harness.words import csv_cell

FILE = "results.csv"
_LABEL = "labels."
_HIDDEN = "(hidden)"
_WORD = 6
"""Characters from which on a name is replaced inside of words, too."""
_PATH = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+|(?<![\w.~/])(?:~?/|[A-Za-z]:[\\/])[^\s:;,'\"]+")
_DIGEST = re.compile(r"[0-9a-f]{32,64}")


def publish(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return runs as others may see them: devices and hosts have numbers, by their first run."""
    names = {
        **_numbered("host", (run.provenance.host for run in runs)),
        **_numbered("device", (run.device.serial for run in runs)),
    }
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    patterns = (
        re.escape(name) if len(name) >= _WORD else rf"(?<!\w){re.escape(name)}(?!\w)"
        for name in longest_first
    )
    found = re.compile("|".join(patterns) or "(?!)")

    def hide(value: Any) -> Any:  # noqa: ANN401  any part of a record
        if isinstance(value, str) and not _DIGEST.fullmatch(value):
            return _PATH.sub(_HIDDEN, found.sub(lambda match: names[match[0]], value))
        if isinstance(value, Mapping):
            return {hide(key): hide(one) for key, one in value.items()}
        return tuple(map(hide, value)) if isinstance(value, tuple | list) else value

    return tuple(Run.model_validate(hide(_allowed(run))) for run in runs)


def _numbered(noun: str, names: Iterable[str]) -> dict[str, str]:
    return {name: f"{noun}-{n}" for n, name in enumerate(dict.fromkeys(filter(None, names)), 1)}


def _allowed(run: Run) -> dict[str, Any]:
    """Return the fields of a run that are published."""
    values = run.model_dump(exclude={"plan", "error", "generated_text"})
    prompt = values["workload"].pop("prompt")
    if prompt is not None:
        values["workload"]["prompt_sha256"] = (
            run.workload.prompt_sha256 or sha256(prompt.encode()).hexdigest()
        )
    values["provenance"]["git_branch"] = None
    if run.origin is not None:
        values["origin"]["file"] = run.origin.tool
    return values


def read_published(text: str, where: str, source: str) -> tuple[Run, ...]:
    """Read the runs of a `results.csv`, under the name of their source.

    Args:
        where: the file, for errors.
        source: a label of the runs, and before the names of their devices: those of two sources
            are never the same.

    Raises:
        HostFileError: it is no such file, or a value is none that a run can have.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: dict[str, dict[str, str]] = {}
    measured: dict[str, list[dict[str, object]]] = {}
    parser = RunParser(where)
    try:
        if not {"run_id", "is_warmup", "repetition"} <= {*(reader.fieldnames or ())}:
            raise HostFileError(where, "it is no table of `qnnfarm report --public`")
        for row in reader:
            run_id = rows.setdefault(row["run_id"], row)["run_id"]
            place = {"is_warmup": row["is_warmup"] == "True", "repetition": int(row["repetition"])}
            measured.setdefault(run_id, []).extend(
                {"metric": key, "value": float(row[key]), "source": None, **place}
                for key in METRICS
                if row.get(key)
            )
        return tuple(
            _of_source(parser.parse(_columns(row), measured[run_id]), source)  # type: ignore[arg-type]
            for run_id, row in rows.items()
        )
    except (ValueError, TypeError, csv.Error) as error:
        raise HostFileError(where, f"line {reader.line_num}: {error}") from error
    except CorruptRunError as error:
        raise HostFileError(where, str(error)) from error


def _of_source(run: Run, source: str) -> Run:
    device = run.device.model_copy(update={"serial": f"{source} {run.device.serial}"})
    return run.model_copy(update={"device": device, "labels": {**run.labels, "published": source}})


_NAMES = {"id": "run_id", "prompt_tokens": "prompt_tokens_requested"}


def _columns(row: Mapping[str, str]) -> dict[str, object]:
    """Return the columns of a run in the database from those of a repetition in the table."""
    labels = {
        key.removeprefix(_LABEL): _plain(value)
        for key, value in row.items()
        if key and key.startswith(_LABEL) and value
    }
    found = {
        column.name: _value(column, row.get(_NAMES.get(column.name, column.name)) or "")
        for column in schema.runs.columns
    }
    return {**found, "labels": labels}


def _value(column: Column[Any], text: str) -> object:
    kind = column.type
    if not text:
        return None if column.nullable or not isinstance(kind, Text) else ""
    if isinstance(kind, JSON):
        return json.loads(_plain(text))
    if isinstance(kind, schema.UtcDateTime):
        return datetime.fromisoformat(text)
    if isinstance(kind, Boolean):
        return text == "True"
    if isinstance(kind, Integer):
        return int(text)
    return float(text) if isinstance(kind, Double) else _plain(text)


def _plain(text: str) -> str:
    """Undo `csv_cell`."""
    return text[1:] if text[:1] == "'" and csv_cell(text[1:]) == text else text
