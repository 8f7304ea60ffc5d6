"""A plan's run in a lab: its cells are submitted, followed from any host, and cancelled."""

import getpass
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigFileError, FailureClass, WrongUseError
from harness.lab.content import find_files
from harness.lab.jobs import CellEnd, LabJobs, PlanSettings
from harness.plans.cell_queue import Durations
from harness.plans.cell_runner import DeviceCellRunner, ModelCache
from harness.plans.cells import Cell
from harness.plans.matrix import expand, select
from harness.plans.outcome import CellOutcome, CellResult, Failure, Summary
from harness.plans.plan_file import Plan, load_plan
from harness.plans.plan_run import find_database
from harness.plans.protocols import Observer
from harness.pool.status import MemberStatus
from harness.results.store import LazyResultsStore

_TICK_S = 1.0
_PRIORITY_PER_S = 10
_LAST = 30_000
"""procrastinate keeps priorities in an INTEGER; an hour is more than enough for an order."""


@dataclass(frozen=True, slots=True)
class LabRun:
    """A run of a plan in a lab.

    Attributes:
        id: of the run, which all who follow it share.
        submitted: keys of the cells that were not done then.
        location: of the results.
    """

    plan: Plan
    cells: tuple[Cell, ...]
    id: str
    jobs: LabJobs
    runner: DeviceCellRunner
    submitted: frozenset[str]
    location: str

    @property
    def done_before(self) -> int:
        """Number of cells that were done when it was opened."""
        return len(self.cells) - len(self.submitted)

    def submit(self, origin: str) -> int:
        """Submit the cells that are not done, do not wait and do not run; return their number."""
        waiting = [cell for cell in self.cells if cell.key in self.submitted]
        durations = Durations(waiting)
        files = find_files(waiting, tuple(self.plan.push))
        chosen = (
            (cell, its_files, _priority(durations.expected_s(cell)))
            for cell, its_files in zip(waiting, files, strict=True)
        )
        return self.jobs.submit(self.id, settings_of(self.plan), origin, chosen)

    def follow(self, observer: Observer) -> Summary:
        """Wait until no cell waits or runs, and say how each ended.

        A KeyboardInterrupt ends the waiting, and nothing else.
        """
        began, told = time.monotonic(), dict[str, str]()
        interrupted = False
        try:
            while self._tell(observer, told):
                time.sleep(_TICK_S)
        except KeyboardInterrupt:
            interrupted = True
        return Summary(tuple(self._outcomes()), time.monotonic() - began, interrupted)

    def _tell(self, observer: Observer, told: dict[str, str]) -> bool:
        """Tell what changed; return whether anything waits or runs."""
        live = bool(self.jobs.live(self.id))  # first: what ends from here on is told next time
        ends = self.jobs.ends(self.id)
        for cell in self.cells:
            end = ends.get(cell.key)
            if end is None or told.get(cell.key) == end.status:
                continue
            if end.status == "begun":
                observer.on_cell_start(cell, f"{end.device} on {end.host}")
            elif cell.key in self.submitted and end.status != "interrupted":
                observer.on_cell_end(self._outcome(cell, end))
            told[cell.key] = end.status
        return live

    def _outcomes(self) -> Iterator[CellOutcome]:
        ends = self.jobs.ends(self.id)
        return (self._outcome(cell, ends.get(cell.key)) for cell in self.cells)

    def _outcome(self, cell: Cell, end: CellEnd | None) -> CellOutcome:
        result, device = self.result(cell, end), ""
        if end is not None:
            device = f"{end.device} on {end.host}"
        if result is not None:
            seconds, resumed = end.duration_s if end else 0.0, cell.key not in self.submitted
            return CellOutcome(cell, "done", resumed, device, result, duration_s=seconds)
        if end is None or end.status in {"begun", "interrupted"}:
            return CellOutcome(cell)
        failure = Failure(FailureClass.OUTPUT, end.error, end.reason)
        return CellOutcome(cell, "failed", device=device, failures=((device, failure),))

    def result(self, cell: Cell, end: CellEnd | None) -> CellResult | None:
        """Return the result of a cell: the store's, but for plain commands, which store none.

        Args:
            end: what became of the cell, if it has begun.
        """
        if cell.workload.needs_container:
            return self.runner.stored_result(cell)
        return CellResult(summary=end.summary) if end and end.status == "done" else None


@contextmanager
def open_lab_run(
    plan_file: Path, *, db: str | None = None, only: Sequence[str] = (), fresh: bool = False
) -> Iterator[LabRun]:
    """Open the newest run of a plan in a lab, or a new one.

    Args:
        db: overrides the plan's.
        only: select cells by patterns of their labels.
        fresh: begin a new one in any case.

    Raises:
        ConfigFileError: the plan cannot be used.
        WrongUseError: no cell matches `only`, or the database is a file.
        StoreError: it cannot be used.
    """
    plan = load_plan(plan_file)
    location = find_database(plan, plan_file, db)
    models = ModelCache()

    def members() -> Sequence[MemberStatus]:
        reason = "a lab's hosts have pools of their own: name devices in place of `count: all`"
        raise ConfigFileError(str(plan_file), None, "devices", reason)

    with ExitStack() as stack:
        cells = expand(
            plan,
            plan_file,
            identify=lambda path, runtime: models.open(path, runtime).info.sha256,
            check=lambda path, runtime, workload: workload.check(models.open(path, runtime)),
            members=members,
        )
        cells = select(cells, only)
        if not cells:
            raise WrongUseError(f"no cell of {plan_file} matches {' or '.join(only)}")
        jobs = stack.enter_context(LabJobs(location))
        store = stack.enter_context(LazyResultsStore(location))
        plan_run = jobs.begin(plan.name, own_address(), fresh=fresh)
        runner = DeviceCellRunner(store, models, plan_run)
        run = LabRun(plan, cells, plan_run, jobs, runner, frozenset(), store.location)
        ends = jobs.ends(plan_run)
        missing = frozenset(c.key for c in cells if run.result(c, ends.get(c.key)) is None)
        yield replace(run, submitted=missing)


def own_address() -> str:
    """Return this machine as SSH of another host would reach it."""
    return f"{getpass.getuser()}@{socket.getfqdn()}"


def settings_of(plan: Plan) -> PlanSettings:
    """Return what the cells of a plan need of it wherever they run."""
    return PlanSettings(
        plan=plan.name,
        runner_timeout_s=plan.timeouts.runner_s,
        conditions=None if plan.conditions == "none" else plan.conditions,
        telemetry=plan.telemetry,
        log_level=plan.log_level,
        trace=plan.trace,
        labels=plan.labels,
    )


def _priority(expected_s: float) -> int:
    """Return a priority by which the longest cells run first."""
    return min(round(expected_s * _PRIORITY_PER_S), _LAST)
