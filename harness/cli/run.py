"""`qnnfarm run`: a plan's matrix of containers, devices and workloads on the devices of a pool."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from harness.cli.arguments import Json
from harness.console import EMULATOR, Row, answers, print_json, print_rows, remarks
from harness.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from harness.plans.outcome import Failure, Summary
    from harness.plans.plan_run import Campaign


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan.")],
    db: Annotated[
        str | None,
        typer.Option(help="Results database, instead of the plan's: a SQLite file, or a URL."),
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(help="Pool configuration, instead of the plan's.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cells whose label matches, e.g. `tiny/*`; may be given again."),
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Use at most so many devices at once.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run all cells, also those that are done.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells and what is done; run nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a plan: containers x devices x workloads, with retries; goes on after a crash.

    Exits 1 where cells failed; 2 where devices alone kept it from measuring anything.
    """
    from harness.plans.plan_run import open_campaign

    console = remarks()
    with open_campaign(
        plan_file, db=db, pool_file=pool, only=only or (), fresh=fresh, begin=not dry_run,
        tell=lambda words: console.print(Text(words), soft_wrap=True),
    ) as campaign:  # fmt: skip
        if dry_run:
            _show_cells(campaign, as_json=json)
            return
        summary = _run(campaign, max_parallel, console)
    if json:
        print_json(_as_mapping(campaign, summary))
    else:
        _show(campaign, summary)
    raise typer.Exit(summary.exit_code)


def _run(campaign: "Campaign", max_parallel: int | None, console: "Console") -> "Summary":
    from harness.cli.run_progress import RunProgress

    if campaign.done_before or campaign.lost:
        words = f"going on: {campaign.done_before} of {len(campaign.cells)} cells are done"
        lost = f", {campaign.lost} were cut off and run again" if campaign.lost else ""
        console.print(words + lost)
    progress = RunProgress(console, campaign.cells, campaign.done_before)
    with progress.live() or nullcontext():
        return campaign.run(max_parallel=max_parallel, observer=progress)


def _show_cells(campaign: "Campaign", *, as_json: bool) -> None:
    from harness.plans.matrix import cell_as_mapping

    if as_json:
        print_json([{**cell_as_mapping(c), "done": campaign.is_done(c)} for c in campaign.cells])
        return
    rows = []
    for cell in campaign.cells:
        done = "done" if campaign.is_done(cell) else ""
        rows.append(Row([cell.label, str(cell.requirement), cell.workload.kind, done]))
    print_rows(("cell", "device", "work", ""), rows)
    answers().print(f"{counted(len(campaign.cells), 'cell')}, {campaign.done_before} of them done")


def _as_mapping(campaign: "Campaign", summary: "Summary") -> dict[str, object]:
    return {
        "plan": campaign.plan.name,
        "campaign": campaign.journal.campaign,
        "db": campaign.location,
        "exit_code": summary.exit_code,
        "interrupted": summary.interrupted,
        "elapsed_s": round(summary.elapsed_s, 3),
        "done": summary.count("done"),
        "failed": summary.count("failed"),
        "left": summary.count("left") + summary.count("interrupted"),
        "cells": [outcome.as_mapping() for outcome in summary.outcomes],
    }


def _show(campaign: "Campaign", summary: "Summary") -> None:
    rows = []
    first: dict[Failure, str] = {}
    for outcome in summary.outcomes:
        failure = outcome.failure
        said = outcome.result.summary
        if failure and failure in first:
            said = f"as {first[failure]}"
        elif failure:
            said = f"{failure.error}: {failure.reason}"
            first[failure] = outcome.cell.label
        status = "done before" if outcome.resumed else outcome.status
        rows.append(Row([outcome.cell.label, status, outcome.device, said]))
    print_rows(("cell", "", "device", "result"), rows)
    console = answers()
    left = summary.count("left") + summary.count("interrupted")
    kept = f"; results in {campaign.location}" if campaign.has_results else ""
    console.print(
        f"{summary.count('done')} done, {summary.count('failed')} failed, {left} left in "
        f"{summary.elapsed_s:.1f} s{kept}",
        markup=False,
    )
    if any(outcome.result.emulator for outcome in summary.outcomes):
        console.print(EMULATOR)
    if left or summary.count("failed"):
        console.print("the same command runs what is not done; --fresh runs all", markup=False)
