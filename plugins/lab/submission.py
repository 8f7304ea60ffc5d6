"""A plan's run in a lab: its cells are submitted, followed from any host, and cancelled."""

import getpass
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigFileError, FailureClass
from harness.plans.cell_queue import Durations
from harness.plans.cell_runner import DeviceCellRunner, ModelCache, PlanSettings
from harness.plans.cells import Cell
from harness.plans.journal import CellEnd, read_durations
from harness.plans.outcome import CellOutcome, Failure, Summary
from harness.plans.plan_file import Plan
from harness.plans.plan_run import find_cells
from harness.plans.protocols import Observer
from harness.pool.requirement import MemberStatus
from plugins.lab.builds import LabBuilds
from plugins.lab.content import find_files
from plugins.lab.jobs import LabJobs, insist

_TICK_S = 1.0
_PRIORITY_PER_S = 10
"""The longest cells run first."""
_LAST = 30_000
"""procrastinate keeps priorities in an INTEGER; an hour is more than enough for an order."""


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A `LabRun`.

    Attributes:
        submitted: keys of the cells that were not done then.
    """

    plan: Plan
    cells: tuple[Cell, ...]
    id: str
    jobs: LabJobs
    runner: DeviceCellRunner
    submitted: frozenset[str]

    @property
    def location(self) -> str:
        """See `LabRun`."""
        return self.jobs.store.location

    @property
    def done_before(self) -> int:
        """See `LabRun`."""
        return len(self.cells) - len(self.submitted)

    def submit(self) -> int:
        """See `LabRun`."""
        cells = [cell for cell in self.cells if cell.key in self.submitted]
        with self.jobs.store.database.reading() as connection:
            durations = Durations(cells, read_durations(connection, self.plan.name))
        files = find_files(cells, tuple(self.plan.push), self.runner.models)
        live = self.jobs.live(self.id)  # first: what ends meanwhile is found done
        done = self.runner.earlier_outcomes(cells, self.jobs.ends(self.id))
        entries = (
            (cell, its_files, min(round(durations.expected_s(cell) * _PRIORITY_PER_S), _LAST))
            for cell, its_files in zip(cells, files, strict=True)
            if cell.key not in live and cell.key not in done
        )
        return self.jobs.submit(self.id, PlanSettings.of(self.plan), entries)

    def follow(self, observer: Observer) -> Summary:
        """See `LabRun`."""
        began, statuses = time.monotonic(), dict[str, str]()
        interrupted = False
        try:
            while self._tell(observer, statuses):
                time.sleep(_TICK_S)
        except KeyboardInterrupt:
            interrupted = True
        outcomes = insist(lambda: tuple(self._outcomes(self.cells, self.jobs.ends(self.id))))
        return Summary(outcomes, time.monotonic() - began, interrupted)

    def cancel(self) -> int:
        """See `LabRun`."""
        return self.jobs.cancel(self.id)

    def _tell(self, observer: Observer, statuses: dict[str, str]) -> bool:
        """Tell the changes since those statuses; return whether anything waits or runs."""
        live = insist(lambda: self.jobs.live(self.id))  # first: what ends later is told next time
        ends = insist(lambda: self.jobs.ends(self.id))
        news = []
        for cell in self.cells:
            end = ends.get(cell.key)
            if end is None or statuses.get(cell.key) == end.status:
                continue
            statuses[cell.key] = end.status
            if end.status == "begun":
                observer.on_cell_start(cell, end.where)
            elif end.status != "interrupted" and cell.key in self.submitted:
                news.append(cell)
        for outcome in insist(lambda: list(self._outcomes(news, ends))):
            observer.on_cell_end(outcome)
        return bool(live)

    def _outcomes(
        self, cells: Sequence[Cell], ends: Mapping[str, CellEnd]
    ) -> Iterator[CellOutcome]:
        done = self.runner.earlier_outcomes(cells, ends)
        for cell in cells:
            end = ends.get(cell.key)
            if cell.key in done:
                yield replace(done[cell.key], resumed=cell.key not in self.submitted)
            elif end is None or end.status in {"begun", "interrupted"}:
                yield CellOutcome(cell)
            else:
                failure = Failure(FailureClass.OUTPUT, end.error, end.reason)
                tries = ((end.where, failure),)
                yield CellOutcome(cell, "failed", device=end.where, failures=tries)


class LabClient(LabBuilds):
    """A `Lab`: submits builds and plans to workers, and follows them."""

    __slots__ = ()

    def open_run(
        self, plan: Plan, plan_file: Path, *, only: Sequence[str] = (), fresh: bool = False
    ) -> SubmittedRun:
        """See `Lab`."""
        models = ModelCache()

        def members() -> Sequence[MemberStatus]:
            reason = "a lab's hosts have pools of their own: name devices in place of `count: all`"
            raise ConfigFileError(str(plan_file), None, "devices", reason)

        cells = find_cells(plan, plan_file, models, only, members)
        submitter = f"{getpass.getuser()}@{socket.getfqdn()}"
        plan_run = self.jobs.begin(plan.name, submitter, fresh=fresh)
        runner = DeviceCellRunner(self.jobs.store, models, plan_run)
        done = runner.earlier_outcomes(cells, self.jobs.ends(plan_run))
        submitted = frozenset(cell.key for cell in cells if cell.key not in done)
        return SubmittedRun(plan, cells, plan_run, self.jobs, runner, submitted)


@contextmanager
def open_lab(location: str) -> Iterator[LabClient]:
    """Open the lab of a database; see `OpenLab`."""
    with LabJobs(location) as jobs:
        yield LabClient(jobs)
