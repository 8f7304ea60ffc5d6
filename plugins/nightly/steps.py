"""The steps of a night, each through the public surface of the package that does it."""

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from harness.cli.run_progress import RunProgress
from harness.errors import NO_ANSWER, HarnessError, MissingStoreError
from harness.plans.builds import ContainerBuild, build_containers, without_containers
from harness.plans.cells import Cell
from harness.plans.matrix import resolve_path
from harness.plans.plan_file import Plan
from harness.plans.plan_run import open_plan_run
from harness.plans.protocols import Observer
from harness.results.alerts import (
    Alert,
    group_alerts,
    is_news,
    list_alerts,
    mark_told,
    review_new,
)
from harness.results.provenance import git_state
from harness.results.store import ResultsStore
from harness.results.turnover import find_turnover
from harness.results.verdicts import Verdict
from plugins.nightly.job import Measured, Reported
from plugins.nightly.night import Cells, Night, NightFailure, Regression, SeriesCounts
from reports import page
from reports.devices import read_device_health

if TYPE_CHECKING:
    from rich.console import Console

    from harness.plans.lab import OpenLab
    from harness.plans.outcome import Summary
    from harness.results.device_health import DeviceHealth


@dataclass(frozen=True, slots=True)
class PlanSteps:
    """The steps of a plan's night; a `Steps`.

    Attributes:
        db: overrides the plan's; relative to the working folder.
        pool_file: overrides the plan's.
        console: for progress; `None` shows none.
        open_lab: opens the lab of that database, whose workers build and measure; `None` does it
            here.
    """

    plan: Plan
    plan_file: Path
    db: str
    pool_file: Path | None = None
    max_parallel: int | None = None
    console: "Console | None" = None
    open_lab: "OpenLab | None" = None

    def build(self) -> Sequence[ContainerBuild]:
        """See `Steps`."""
        if self.open_lab is None:
            return build_containers(self.plan, self.plan_file, self._show)
        with self.open_lab(self.db) as lab:
            return lab.build_containers(self.plan, self.plan_file, self._show)

    def measure(
        self, *, fresh: bool, skipped: Collection[str], on_begin: Callable[[str], None]
    ) -> Measured:
        """See `Steps`."""
        plan = without_containers(self.plan, self.plan_file, skipped)
        if self.plan.containers and not plan.containers:
            return Measured(Cells(), no_answer="none of the plan's containers could be built")
        run = self._run_here if self.open_lab is None else partial(self._run_in_lab, self.open_lab)
        summary = run(plan, on_begin, fresh=fresh)
        if summary.interrupted:
            raise KeyboardInterrupt
        return measured(summary)

    def _run_here(self, plan: Plan, on_begin: Callable[[str], None], *, fresh: bool) -> "Summary":
        with open_plan_run(
            self.plan_file, db=self.db, pool_file=self.pool_file, fresh=fresh, plan=plan,
            on_progress=self._show,
        ) as plan_run:  # fmt: skip
            on_begin(plan_run.id)
            with self._observer(plan_run.cells, plan_run.done_before) as observer:
                return plan_run.run(max_parallel=self.max_parallel, observer=observer)

    def _run_in_lab(
        self, open_lab: "OpenLab", plan: Plan, on_begin: Callable[[str], None], *, fresh: bool
    ) -> "Summary":
        with open_lab(self.db) as lab:
            lab_run = lab.open_run(plan, self.plan_file, fresh=fresh)
            on_begin(lab_run.id)
            lab_run.submit()
            with self._observer(lab_run.cells, lab_run.done_before) as observer:
                return lab_run.follow(observer)

    @contextmanager
    def _observer(self, cells: Sequence[Cell], done_before: int) -> Iterator[Observer]:
        if self.console is None:
            yield Observer()
            return
        observer = RunProgress(self.console, cells, done_before)
        with observer.live() or nullcontext():
            yield observer

    def judge(self) -> tuple[Regression, ...]:
        """See `Steps`; plain commands leave no results."""
        try:
            existing = ResultsStore.open_existing(self.db)
        except MissingStoreError:
            return ()
        with existing as store:
            review_new(store)
            alerts = list_alerts(store)
        return tuple(
            _regression(alert, group)
            for group in group_alerts(alerts)
            for alert in group
            if alert.state == "open"
        )

    def settle(self, night: Night) -> None:
        """See `Steps`."""
        if night.regressions:
            with ResultsStore.open(self.db) as store:
                mark_told(store, [each.id for each in night.regressions])

    def write_report(self, path: Path, began_at: datetime) -> Reported | None:
        """See `Steps`; plain commands leave no results."""
        from reports import html_file  # with Jinja

        try:
            composed = page.compose(page.load(self.db, devices=self._device_health()))
        except MissingStoreError:
            return None
        html_file.write(html_file.render(composed, datetime.now(UTC)), path)
        series = composed.results.series
        return Reported(find_turnover(series), _count_series(composed, began_at))

    def _device_health(self) -> "Sequence[DeviceHealth]":
        pool_file = self.pool_file
        if pool_file is None and self.plan.pool is not None:
            pool_file = resolve_path(self.plan_file, self.plan.pool)
        try:
            return read_device_health(pool_file)
        except HarnessError as error:  # the night's results are what counts
            self._show(f"the report leaves out the health of devices: {error}")
            return ()

    def _show(self, words: str) -> None:
        if self.console is not None:
            self.console.print(Text(words), soft_wrap=True)


def _count_series(composed: page.Page, began_at: datetime) -> SeriesCounts:
    """Count the series and outputs of the time since, by the verdicts of a report."""
    ids = {one.id for one in composed.results.series if one.newest.created_at >= began_at}
    changes = [one for section in composed.sections for one in section.changes]
    judged = {one.series.id for one in changes if one.verdict is not Verdict.NO_VERDICT} & ids
    suspected = {one.series.id for one in changes if one.is_suspect} & ids - judged
    runs = (one.run for one in composed.results.measured if one.run.created_at >= began_at)
    outputs = Counter(run.check.outcome for run in runs if run.status == "done")
    return SeriesCounts(
        judged=len(judged), unjudged=len(ids - judged), suspected=len(suspected),
        checked=outputs["passed"], unchecked=outputs["none"],
    )  # fmt: skip


def measured(summary: "Summary") -> Measured:
    """Say how the cells of a run ended."""
    failures = tuple(
        NightFailure(cell=outcome.cell.label, error=failure.error, reason=failure.reason)
        for outcome in summary.outcomes
        if (failure := outcome.failure) is not None
    )
    cells = Cells(
        done=summary.count("done"),
        failed=summary.count("failed"),
        left=summary.count("left") + summary.count("interrupted"),
    )
    if summary.exit_code != NO_ANSWER:
        return Measured(cells, failures)
    return Measured(cells, failures, f"no {'device measured anything' if failures else 'cell ran'}")


def _regression(alert: Alert, group: Sequence[Alert]) -> Regression:
    commits = dict.fromkeys(filter(None, (alert.good_commit, alert.bad_commit)))
    return Regression(
        id=alert.id,
        cause=group[0].id,
        metric=alert.metric.key,
        series=alert.name,
        change=alert.ratio - 1,
        since=f"{alert.began_at:%Y-%m-%d}",
        commits=tuple(commits),
        is_new=is_news(alert, group),
        is_old=alert.backfilled,
    )


def local_now() -> datetime:
    """Return the time in this host's zone."""
    return datetime.now().astimezone()


def start_night(plan: str, name: str, now: datetime) -> Night:
    """Make the record of a night that begins now, at the working folder's commit."""
    state = git_state(Path.cwd())
    return Night(
        plan=plan,
        name=name,
        began_at=now,
        host=socket.gethostname(),
        commit=state.commit,
        branch=state.branch,
    )
