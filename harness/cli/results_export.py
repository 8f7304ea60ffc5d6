"""`qnnfarm results export`: results as a table for other tools."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import Database, write_file
from harness.cli.completion import complete_socs
from harness.cli.history import Since
from harness.console import print_remark
from harness.errors import WrongUseError
from harness.results.records import RunKind, RunStatus
from harness.results.store import RunFilter
from harness.words import pluralize

if TYPE_CHECKING:
    import pandas as pd  # slow to import

_STDOUT = "-"


class Format(StrEnum):
    """File formats, named by their suffix."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


class Rows(StrEnum):
    """Kind of a table's rows."""

    REPETITIONS = "repetitions"
    RUNS = "runs"
    TELEMETRY = "telemetry"


def export(
    file: Annotated[
        str, typer.Argument(help="File to write: .parquet, .csv or .jsonl; - is stdout.")
    ],
    db: Database = "results.db",
    rows: Annotated[
        Rows,
        typer.Option(
            help="A row for each repetition with its run, for each run, or for each sample."
        ),
    ] = Rows.REPETITIONS,
    format_: Annotated[
        Format | None, typer.Option("--format", help="By default, by the file's suffix.")
    ] = None,
    since: Since = None,
    newest: Annotated[int | None, typer.Option(min=1, help="At most the newest N runs.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    soc: Annotated[
        str | None, typer.Option(help="Only this SoC.", autocompletion=complete_socs)
    ] = None,
    kind: Annotated[RunKind | None, typer.Option(help="Only runs of this kind.")] = None,
    status: Annotated[RunStatus | None, typer.Option(help="Only runs that ended so.")] = None,
) -> None:
    """Write results as Parquet, CSV or JSON lines.

    The columns and their units are those of `harness.results.frames`: see docs/analysis.md.

    Example: qnnfarm results export results.csv --since 7d
    """
    file_format = _format_of(file, format_)
    run_filter = RunFilter(
        kind=kind, status=status, model=model, soc=soc, since=since, newest=newest
    )
    from harness.results.data_frames import encode, frames

    tables = frames(db, run_filter, telemetry=rows is Rows.TELEMETRY)
    frame: pd.DataFrame = getattr(tables, rows)
    content = encode(frame, file_format.value)
    if file == _STDOUT:
        sys.stdout.buffer.write(content)
        return
    write_file(Path(file), content)
    print_remark(f"{pluralize(len(frame), 'row')} in {file}")


def _format_of(file: str, choice: Format | None) -> Format:
    if choice is not None:
        return choice
    suffix = Path(file).suffix.removeprefix(".").lower()
    if suffix not in set(Format):
        suffixes = ", ".join(f".{each}" for each in Format)
        problem = (
            "stdout has no suffix" if file == _STDOUT else f"{file} has no suffix of {suffixes}"
        )
        raise WrongUseError(f"{problem}: give --format {'|'.join(Format)}")
    return Format(suffix)
