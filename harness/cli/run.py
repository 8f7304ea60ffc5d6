"""`qnnfarm run`: runs a plan's matrix of containers, devices and workloads on a pool."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from harness.cli.arguments import Json, MaxParallel, PlanDb, PlanFile, PlanPool
from harness.cli.run_progress import RunProgress
from harness.console import answers, print_json, print_remark, print_rows, remarks
from harness.errors import WrongUseError
from harness.plans.builds import planned_builds
from harness.plans.lab import Lab, find_lab
from harness.plans.matrix import cell_as_mapping
from harness.plans.outcome import Failure, Summary
from harness.plans.plan_file import Plan, load_plan
from harness.plans.plan_run import PlanRun, find_database, open_plan_run
from harness.words import emulator_notice, pluralize


def run(
    plan_file: PlanFile,
    db: PlanDb = None,
    pool: PlanPool = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cells whose label matches, e.g. `tiny/*`; may be repeated."),
    ] = None,
    max_parallel: MaxParallel = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run all cells, including those that are done.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells and which are done; run nothing.")
    ] = False,
    lab: Annotated[
        bool,
        typer.Option(
            "--lab",
            help="Let the workers of a lab run the cells, and follow them; Ctrl-C leaves them "
            "running.",
        ),
    ] = False,
    cancel: Annotated[
        bool,
        typer.Option("--cancel", help="With --lab: end the plan's builds, or its newest run."),
    ] = False,
    json: Json = False,
) -> None:
    """Run a plan: containers x devices x workloads, with retries; resumes after a crash.

    Exits 1 if cells failed, 2 if all that failed did so by their devices.

    Example: qnnfarm run PLAN.yaml --dry-run
    """
    if cancel and not lab:
        raise WrongUseError("--cancel needs --lab: Ctrl-C ends a plan that runs here")
    if lab:
        _in_lab(plan_file, db, only or (), fresh=fresh, cancel=cancel)
        return
    console = remarks()
    with open_plan_run(
        plan_file, db=db, pool_file=pool, only=only or (), fresh=fresh, dry_run=dry_run,
        on_progress=lambda words: console.print(Text(words), soft_wrap=True),
    ) as plan_run:  # fmt: skip
        if dry_run:
            _show_cells(plan_run, as_json=json)
            return
        summary = _run(plan_run, max_parallel, console)
    if json:
        print_json(_document(plan_run, summary))
    else:
        _show(plan_run, summary)
    raise typer.Exit(summary.exit_code)


def _build(in_lab: Lab, plan: Plan, plan_file: Path) -> None:
    """Let a lab build the containers of a plan."""
    try:
        builds = in_lab.build_containers(plan, plan_file, print_remark)
    except KeyboardInterrupt:
        print_remark("the builds go on: the same command follows them, and runs the cells")
        raise
    for one in builds:
        if one.error:
            raise WrongUseError(f"{plan_file}: build {one.label}: {one.error}")


def _in_lab(
    plan_file: Path, db: str | None, only: Sequence[str], *, fresh: bool, cancel: bool
) -> None:
    """Submit a plan to a lab and follow it, or cancel its builds and its newest run."""
    console, open_lab, plan = remarks(), find_lab(), load_plan(plan_file)
    with open_lab(find_database(plan, plan_file, db)) as lab:
        if any(entry.build for entry in plan.containers):
            if not cancel:
                _build(lab, plan, plan_file)
            elif count := lab.cancel(tuple(planned_builds(plan, plan_file))):
                answers().print(f"{pluralize(count, 'build')} cancelled")
                return  # their cells are submitted once they are built
        lab_run = lab.open_run(plan, plan_file, only=only, fresh=fresh)
        if cancel:
            answers().print(f"{pluralize(lab_run.cancel(), 'cell')} cancelled")
            return
        submitted = lab_run.submit()
        console.print(
            f"{pluralize(submitted, 'cell')} submitted, "
            f"{lab_run.done_before} of {len(lab_run.cells)} done"
        )
        progress = RunProgress(console, lab_run.cells, lab_run.done_before)
        with progress.live() or nullcontext():
            summary = lab_run.follow(progress)
        if summary.interrupted:
            console.print("the cells go on: the same command follows them, --cancel ends them")
        _print_outcomes(summary)
        answers().print(f"{summary}; results in {lab_run.location}")
        raise typer.Exit(summary.exit_code)


def _run(plan_run: PlanRun, max_parallel: int | None, console: Console) -> Summary:
    if plan_run.done_before or plan_run.lost:
        words = f"resuming: {plan_run.done_before} of {len(plan_run.cells)} cells are done"
        lost = f"; {plan_run.lost} were interrupted and run again" if plan_run.lost else ""
        console.print(words + lost)
    progress = RunProgress(console, plan_run.cells, plan_run.done_before)
    with progress.live() or nullcontext():
        return plan_run.run(max_parallel=max_parallel, observer=progress)


def _show_cells(plan_run: PlanRun, *, as_json: bool) -> None:
    cells = plan_run.cells
    if as_json:
        print_json([{**cell_as_mapping(cell), "done": cell.key in plan_run.done} for cell in cells])
        return
    rows = []
    for cell in cells:
        mark = "done" if cell.key in plan_run.done else ""
        rows.append([cell.label, str(cell.requirement), cell.workload.kind, mark])
    print_rows(("cell", "device", "workload", ""), rows)
    answers().print(f"{pluralize(len(cells), 'cell')}, {plan_run.done_before} done")


def _failed_runs(plan_run: PlanRun, summary: Summary) -> dict[str, str]:
    """Return the stored runs of the failed cells, by the cell's key."""
    runner = plan_run.runner
    if runner is None:
        return {}
    cells = [outcome.cell for outcome in summary.outcomes if outcome.status == "failed"]
    runs = ((cell.key, runner.failed_run(cell)) for cell in cells)
    return {key: run.id for key, run in runs if run is not None}


def _document(plan_run: PlanRun, summary: Summary) -> dict[str, object]:
    failed_runs = _failed_runs(plan_run, summary)
    return {
        "plan": plan_run.plan.name,
        "plan_run": plan_run.id,
        "db": plan_run.location,
        "exit_code": summary.exit_code,
        "interrupted": summary.interrupted,
        "elapsed_s": round(summary.elapsed_s, 3),
        "done": summary.count("done"),
        "failed": summary.count("failed"),
        "left": summary.count("left") + summary.count("interrupted"),
        "logs": plan_run.logs and str(plan_run.logs),
        "cells": [
            {**outcome.as_mapping(), "failed_run": failed_runs.get(outcome.cell.key)}
            for outcome in summary.outcomes
        ],
    }


def _print_outcomes(summary: Summary) -> None:
    rows = []
    first: dict[Failure, str] = {}
    for outcome in summary.outcomes:
        failure = outcome.failure
        result = outcome.result.summary
        if failure and failure in first:
            result = f"as {first[failure]}"
        elif failure:
            result = f"{failure.error}: {failure.reason}"
            first[failure] = outcome.cell.label
        status = "done before" if outcome.resumed else outcome.status
        rows.append([outcome.cell.label, status, outcome.device, result])
    print_rows(("cell", "", "device", "result"), rows)
    virtual = [one.cell.runtime for one in summary.outcomes if one.result.emulator]
    if virtual:
        answers().print(emulator_notice(virtual))


def _show(plan_run: PlanRun, summary: Summary) -> None:
    _print_outcomes(summary)
    console = answers()
    n_left = summary.count("left") + summary.count("interrupted")
    console.print(f"{summary}; results in {plan_run.location}")
    failed_runs = _failed_runs(plan_run, summary)
    if failed_runs:
        run_id = next(iter(failed_runs.values()))
        command = f"qnnfarm results show {run_id} --db {plan_run.location} --save FOLDER"
        console.print(f"logs of failed cells: {command}", soft_wrap=True)
    if summary.count("failed") and plan_run.logs is not None:
        console.print(f"logs of the devices during failed tries: {plan_run.logs}")
    if n_left or summary.count("failed"):
        console.print("the same command runs the cells that are not done; --fresh runs all")
