"""The command `qnnfarm nightly`. Heavy imports wait until it runs, so that `--help` stays quick."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import (
    Json,
    MaxParallel,
    PlanDb,
    PlanFile,
    PlanPool,
)
from harness.console import answers, print_json, print_remark, remarks
from harness.errors import BAD, GOOD, INTERRUPTED, NightlyBusyError
from harness.plans.lab import find_lab

if TYPE_CHECKING:
    from harness.plans.plan_file import Plan
    from plugins.nightly.archive import Archive
    from plugins.nightly.night import Night


def nightly(
    plan_file: PlanFile,
    db: PlanDb = None,
    pool: PlanPool = None,
    max_parallel: MaxParallel = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure once more, though tonight is over.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing unless there is news: for cron.")
    ] = False,
    test_notifications: Annotated[
        bool, typer.Option("--test-notifications", help="Only send a test to each receiver.")
    ] = False,
    lab: Annotated[
        bool, typer.Option("--lab", help="Let the workers of a lab build and measure.")
    ] = False,
    json: Json = False,
) -> None:
    """Build what changed, run a plan, judge it against its history, report, and send news.

    One night lasts from noon to noon: the command goes on with one that was cut off, and does
    nothing if it is over. Exits 1 if a regression is open or something was not measured, 2 if there
    is no answer.

    Example: qnnfarm nightly PLAN.yaml --quiet
    """
    from harness.plans.plan_file import load_plan
    from harness.plans.plan_run import find_database
    from harness.pool.notifications import send
    from plugins.nightly.archive import Archive
    from plugins.nightly.job import NightlyJob
    from plugins.nightly.steps import PlanSteps, local_now, start_night

    plan = load_plan(plan_file)
    if test_notifications:
        raise typer.Exit(_send_test(plan))
    archive = Archive(_folder(plan, plan_file), plan.name)
    steps = PlanSteps(
        plan, plan_file, find_database(plan, plan_file, db), pool, max_parallel,
        None if quiet else remarks(), find_lab() if lab else None,
    )  # fmt: skip
    job = NightlyJob(
        archive,
        plan.nightly,
        steps,
        lambda name: start_night(plan.name, name, local_now()),
        local_now,
        send,
    )
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        try:
            night = job.run(again=again)
        except KeyboardInterrupt:
            _show_cut_off(archive, quiet=quiet, as_json=json)
            raise
        except NightlyBusyError:
            if quiet:  # a timer that starts it every hour is no news
                raise typer.Exit(NightlyBusyError.exit_code) from None
            raise
    _show(archive, night, quiet=quiet, as_json=json)
    raise typer.Exit(night.exit_code)


def _folder(plan: "Plan", plan_file: Path) -> Path:
    from harness.plans.matrix import resolve_path

    return resolve_path(plan_file, plan.nightly.reports or f"{plan.name}-reports")


def _show_cut_off(archive: "Archive", *, quiet: bool, as_json: bool) -> None:
    """Say how the night goes on that Ctrl-C or a signal ended."""
    night = next((one for one in reversed(archive.nights()) if one.verdict is None), None)
    if night is None:  # it was over, or had not begun
        return
    if as_json:
        print_json({**night.model_dump(mode="json"), "exit_code": INTERRUPTED, "report": None})
    elif not quiet:
        print_remark(
            f"night {night.name} was cut off: what is measured is kept, and the same command goes "
            "on with it"
        )


def _show(archive: "Archive", night: "Night", *, quiet: bool, as_json: bool) -> None:
    from plugins.nightly.archive import INDEX, REPORT

    if as_json:
        folder = archive.path(night)
        report = str(folder / REPORT) if night.report else None
        print_json(
            {**night.model_dump(mode="json"), "exit_code": night.exit_code} | {"report": report}
        )
        return
    if quiet and not night.has_news:
        return
    console = answers()
    console.print(f"night {night.name}: {night.summary}")
    for each in night.regressions:
        console.print(f"  {'new regression' if each.is_new else 'still open'}: {each}")
    for failure in night.failures:
        console.print(f"  {'not measured' if failure.is_new else 'again'}: {failure}")
    if night.report:
        console.print(f"report: {archive.path(night) / REPORT}")
    console.print(f"all nights: {archive.folder / INDEX}")


def _send_test(plan: "Plan") -> int:
    from harness.cli.pool import send_tests
    from harness.pool.notifications import Notification

    if not plan.nightly.tell:
        print_remark(f"the plan {plan.name} names no receivers in `nightly.tell`")
    words = f"a test of the messages of {plan.name}"
    return GOOD if send_tests(plan.nightly.tell, Notification("test", plan.name, words)) else BAD
