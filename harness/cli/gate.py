"""`qnnfarm gate`: judges new results against a baseline in the same database."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Database, Json, Threshold, write_file
from harness.cli.completion import complete_metrics
from harness.console import answers, print_json, print_rows
from harness.errors import WrongUseError
from harness.results import gate_formats
from harness.results.alerts import assess_store
from harness.results.gate import ACROSS, Gate, GateOptions, judge_gate
from harness.results.metrics import GATE_METRICS, JUDGED_METRICS, find_key
from harness.results.store import ResultsStore
from harness.results.verdicts import Verdict, verdict_exit_code


def gate(
    baseline: Annotated[
        str,
        typer.Option(
            metavar="REF",
            help="Baseline: `previous` (the main branch before), a date (2026-11-20: "
            "the newest until its end), a week (2026-W47), days (DATE..DATE), a branch, a commit "
            "or what git takes for one (HEAD~3, v1.2): the nearest with results; or commits "
            "(v1.1..v1.2).",
        ),
    ],
    candidate: Annotated[
        str, typer.Option(metavar="REF", help="Results to judge; by default the newest.")
    ] = "",
    db: Database = "results.db",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric to judge by, or its beginning; may be repeated. By default prefill, "
            "decode, perplexity, and the times of encoders and other models.",
            autocompletion=complete_metrics,
        ),
    ] = None,
    threshold: Threshold = 0.05,
    perplexity_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The threshold of perplexity, which has no noise.")
    ] = 0.005,
    across: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TERM",
            help="Compare even where this differs: precision, container, device, ...; may be "
            "repeated.",
        ),
    ] = None,
    plan: Annotated[
        str, typer.Option(metavar="NAME", help="Only runs of the plan of this name, on both sides.")
    ] = "",
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the verdict for a pull request; `-` prints it."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdict as a JUnit file.")
    ] = None,
    json: Json = False,
) -> None:
    """Judge the newest results against a baseline: regressed, improved, or no difference.

    Exits 1 where a metric of a cell regressed or an output is wrong; 2 where there is no verdict:
    too few sessions, cells that are missing, or results that are not comparable.

    Example: qnnfarm gate --baseline previous --markdown verdict.md
    """
    keys = [find_key(key, JUDGED_METRICS) for key in metric or GATE_METRICS]
    for name in across or ():
        if name not in ACROSS:
            raise WrongUseError(f"--across {name[:40]!r}: it is one of {', '.join(ACROSS)}")
    options = GateOptions(
        tuple(dict.fromkeys(keys)),
        threshold,
        perplexity_threshold,
        frozenset(across or ()),
        plan=plan,
    )
    with ResultsStore.open(db, create=False) as store:
        alerts = assess_store(store, options.metrics)
        judgement = judge_gate(store, baseline, candidate=candidate, options=options, alerts=alerts)
    if junit is not None:
        write_file(junit, gate_formats.to_junit(judgement).encode())
    to_stdout = markdown == Path("-")
    if markdown is not None and not to_stdout:
        write_file(markdown, gate_formats.to_markdown(judgement).encode())
    if json:
        print_json(gate_formats.to_document(judgement))
    elif to_stdout:
        typer.echo(gate_formats.to_markdown(judgement), nl=False)
    else:
        _show(judgement)
    raise typer.Exit(verdict_exit_code(judgement.verdict))


def _show(judgement: Gate) -> None:
    rows = [
        [cell.name, cell.metric.label, *gate_formats.cells_of(cell), cell.verdict]
        for cell in judgement.cells
    ]
    headings = ("cell", "metric", "baseline", "now", "change", "interval", "verdict")
    if rows:
        print_rows(headings, rows, right={"baseline", "now", "change", "interval"})
    console = answers()
    for cell in judgement.cells:
        if cell.verdict is not Verdict.NO_DIFFERENCE:
            console.print(f"{cell.name}, {cell.metric.label}: {cell.reason}")
    for name in judgement.new:
        console.print(f"{name}: no baseline")
    if judgement.has_emulator:
        console.print(judgement.notice)
    console.print(gate_formats.sides(judgement))
    console.print(f"verdict: {judgement.verdict} ({gate_formats.summarize(judgement)})")
