"""`qnnfarm results import`: results of other tools and teams into the same database."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Database, Json
from harness.cli.bench_options import Label, parse_labels
from harness.cli.completion import offering
from harness.console import answers, print_json, print_remark
from harness.importing.importer import Imported, ImportFacts, read_runs, store_runs, tools
from harness.moments import parse_moment
from harness.results.store import ResultsStore
from harness.words import pluralize


def import_results(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files that other tools wrote, or folders of `report --public`."),
    ],
    db: Database = "results.db",
    tool: Annotated[
        str | None,
        typer.Option(
            help="Tool that wrote them; by default found by the content.",
            autocompletion=offering(lambda: [(name, "") for name in tools()]),
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; by default the file's, or its name.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Bits, as in W4A16.")] = None,
    device: Annotated[str | None, typer.Option(help="Serial or name of the device.")] = None,
    soc: Annotated[str, typer.Option(help="SoC of the device, as in SM8750.")] = "",
    emulator: Annotated[
        bool, typer.Option("--emulator", help="They were measured on the HTP emulator.")
    ] = False,
    date: Annotated[
        str | None,
        typer.Option(help="Time of the measurements; by default that in the file, or of the file."),
    ] = None,
    label: Label = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option("--skip-unreadable", help="Leave out what cannot be read, not the file."),
    ] = False,
    json: Json = False,
) -> None:
    """Import results of llama-bench, Genie, geniex-bench, ExecuTorch, mllm and AI Hub.

    Also results that others published with `qnnfarm report --public`.

    A file that cannot be read is refused by line, and nothing of it is stored. Runs that were
    imported before are not imported again, so a file may grow from night to night. The file itself
    is kept with its runs.

    Example: qnnfarm results import llama-bench.json --device SERIAL
    """
    facts = ImportFacts(
        model=model,
        precision=precision,
        device=device,
        soc=soc,
        emulator=emulator,
        created_at=None if date is None else parse_moment(date, "--date"),
        labels=parse_labels(label),
    )
    # No database is made for files that cannot be read.
    contents = [read_runs(path, facts, tool=tool, skip=skip_unreadable) for path in files]
    with ResultsStore.open(db) as store:
        location = store.location
        imports = [store_runs(store, each) for each in contents]
    if json:
        documents = [_document(path, each) for path, each in zip(files, imports, strict=True)]
        print_json({"database": location, "files": documents})
        return
    for path, imported in zip(files, imports, strict=True):
        _show(path, imported, location)


def _document(path: Path, imported: Imported) -> dict[str, object]:
    return {
        "file": str(path),
        "tool": imported.tool,
        "runs": [run.id for run in imported.runs],
        "known": imported.known,
        "refused": [{"line": line, "reason": reason} for line, reason in imported.refused],
    }


def _show(path: Path, imported: Imported, location: str) -> None:
    for line, reason in imported.refused:
        print_remark(f"{path}: left out line {line}: {reason}")
    if not imported.runs:
        answers().print(f"{path}: imported before, nothing to do")
        return
    runs = pluralize(len(imported.runs), "run")
    values = pluralize(sum(len(run.measurements) for run in imported.runs), "measurement")
    earlier = f"; {imported.known} imported before" if imported.known else ""
    answers().print(f"{path}: {runs} with {values} of {imported.tool} in {location}{earlier}")
