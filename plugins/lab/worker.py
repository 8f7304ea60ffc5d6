"""Worker of a lab: runs cells of anybody's plans on the devices of this host's pool.

It is the scheduler of `qnnfarm run` over another queue. A device is leased before a cell is taken
from the queue, so no cell waits here while another host could run it.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from procrastinate.jobs import Status

from harness.errors import LedgerError, StoreError, WrongUseError
from harness.plans.cancellation import CancelToken, CellInterrupted
from harness.plans.cell_queue import CellQueue, Durations
from harness.plans.cell_runner import DeviceCellRunner, ModelCache
from harness.plans.cells import Cell
from harness.plans.journal import CellEnd
from harness.plans.lease_requests import PoolSnapshot
from harness.plans.outcome import CellOutcome, CellResult, Failure
from harness.plans.outcome_log import OutcomeLog
from harness.plans.protocols import Observer
from harness.plans.scheduler import MatrixOptions, Scheduler
from harness.pool.lease import LeasedDevice
from harness.pool.pool import Pool
from harness.pool.requirement import OnProgress, Requirement, ignore_progress
from harness.results.store import ResultsStore
from harness.words import pluralize
from plugins.lab.builds import Builder
from plugins.lab.content import check_cell
from plugins.lab.jobs import (
    DEAD_AFTER_S,
    PATIENCE_S,
    Backlog,
    CellJob,
    LabJobs,
    insist,
    log,
)
from plugins.lab.service import Service

_BEATS = 6
"""Signs of life in the time after which a worker counts as dead."""
_BACKLOG_S = 1.0


class LabQueue:
    """Cells of the lab's queue for the devices of one pool; a `Queue` of the scheduler.

    Cells that failed here and are tried again wait in this process; their jobs stay its own.

    Attributes:
        taken: jobs of cells that this process has, by the keys that its cells have here.
        scheduler: its devices decide which cells are left to other hosts.
    """

    def __init__(self, jobs: LabJobs) -> None:
        self._jobs = jobs
        self._retried = CellQueue((), Durations(()))
        self._backlog: Sequence[Backlog] = ()
        self._read_at = float("-inf")
        self._refused: set[Requirement] = set()
        self.taken: dict[str, CellJob] = {}
        self.scheduler: Scheduler | None = None

    def __len__(self) -> int:
        return len(self._retried) + 1  # others may submit cells at any time

    def requirements(self) -> Sequence[tuple[Requirement, int]]:
        """Return requirements of waiting cells, each with the number of its cells."""
        self._read()
        counts = dict(self._retried.requirements())
        for one in self._backlog:
            requirement = one.sample.requirement
            counts[requirement] = counts.get(requirement, 0) + one.count
        return list(counts.items())

    def waiting(self, requirement: Requirement) -> Iterator[Cell]:
        """Yield cells that wait for a device of this requirement, one of each container."""
        yield from self._retried.waiting(requirement)
        for one in self._backlog:
            if one.sample.requirement == requirement:
                yield one.sample

    def take(
        self,
        fits: Callable[[Requirement], bool],
        allowed: Callable[[Cell], bool],
        *,
        affinity: str,
        devices: int,
    ) -> Cell | None:
        """Take the next cell for a device: one of the container that it has, else the longest."""
        cell = self._retried.take(fits, allowed, affinity=affinity, devices=devices)
        if cell is not None:
            return cell
        fitting = [one for one in self._backlog if fits(one.sample.requirement)]
        for one in sorted(fitting, key=lambda b: (b.sample.affinity != affinity, -b.priority)):
            job = self._fetch(one.queue)
            if job is not None:
                cell = replace(job.cell, key=f"{job.cell.key}@{job.plan_run}")
                self.taken[cell.key] = job
                return cell
        self._read_at = float("-inf")
        return None

    def put(self, cell: Cell) -> None:
        """Add a cell that waits again."""
        self._retried.put(cell)

    def remove(self, cells: Iterable[Cell]) -> None:
        """Leave cells that no device of this pool can run to other hosts."""
        for cell in cells:
            if cell.key in self.taken:
                self._retried.remove([cell])
            else:
                self._refused.add(cell.requirement)

    def learn(self, cell: Cell, seconds: float) -> None:
        """Ignore the duration of a cell: the priority of its job has it."""

    def _fetch(self, queue: str) -> CellJob | None:
        try:
            return self._jobs.fetch(queue)
        except StoreError as error:
            log.warning("%s", error)
            return None

    def _read(self) -> None:
        if time.monotonic() - self._read_at < _BACKLOG_S:
            return
        self._read_at = time.monotonic()
        members = PoolSnapshot(()) if self.scheduler is None else self.scheduler.members
        try:
            backlog = self._jobs.backlog()
        except StoreError as error:
            log.warning("%s", error)
            backlog = ()
        self._backlog = [
            one
            for one in backlog
            if one.sample.requirement not in self._refused
            and members.matching(one.sample.requirement)
        ]


@dataclass
class LabJournal:
    """Tells the lab how cells end; a `Recorder` of the scheduler.

    It waits for a server that is away: no measurement is lost.
    """

    jobs: LabJobs
    queue: LabQueue
    host: str
    aborted: set[int] = field(default_factory=set)

    def record_start(self, key: str, device: str) -> None:
        """Record that a cell is being tried."""
        job = self.queue.taken[key]
        insist(lambda: self.jobs.record(job, CellEnd("begun", self.host, device)))

    def record_ends(self, outcomes: Sequence[CellOutcome]) -> None:
        """Record how cells ended, and end their jobs or give them back."""
        for outcome in outcomes:
            job = self.queue.taken.pop(outcome.cell.key, None)
            if job is not None:
                insist(partial(self._end, job, outcome))

    def give_back_all(self) -> None:
        """Give all jobs back, as this host cannot go on."""
        for key in list(self.queue.taken):
            job = self.queue.taken.pop(key)
            insist(partial(self.jobs.give_back, job))

    def _end(self, job: CellJob, outcome: CellOutcome) -> None:
        self.jobs.record(job, CellEnd.of(outcome, self.host))
        if outcome.status == "interrupted" and job.job.id not in self.aborted:
            self.jobs.give_back(job)
        else:
            statuses = {"done": Status.SUCCEEDED, "interrupted": Status.ABORTED}
            self.jobs.finish(job, statuses.get(outcome.status, Status.FAILED))


@dataclass
class LabRunner:
    """Runs a lab's cells on devices of this host; a `CellRunner`."""

    queue: LabQueue
    store: ResultsStore
    models: ModelCache

    def run(self, cell: Cell, device: LeasedDevice, cancel: CancelToken) -> CellResult:
        """See `CellRunner`. A cell with a result, stored by a worker that died, does not run."""
        job = self.queue.taken[cell.key]
        runner = DeviceCellRunner(self.store, self.models, job.plan_run, job.settings)
        result = runner.stored_result(job.cell)
        if result is not None:
            self.store.interrupt_tries(runner.group_id(job.cell), job.cell.session)
            return result
        try:
            pushes = check_cell(job.cell, job.files, self.models)
            return replace(runner, push=pushes).run(job.cell, device, cancel)
        except StoreError as error:
            log.warning("%s: %s waits again", error, cell.label)
            raise CellInterrupted from error
        except (ArithmeticError, LookupError, TypeError, ValueError, OSError) as error:
            raise WrongUseError(f"{type(error).__name__}: {error}") from error


class _Log(Observer):
    """Tells people of the work of a worker, a line a cell."""

    def __init__(self, tell: OnProgress, forget: Callable[[Cell], None]) -> None:
        self._tell = tell
        self._forget = forget

    def on_cell_start(self, cell: Cell, device: str) -> None:
        """See `Observer`."""
        self._tell(f"{device}: {cell.label} begins")

    def on_cell_retry(self, cell: Cell, device: str, failure: Failure) -> None:
        """See `Observer`."""
        self._tell(f"{device}: {cell.label} is tried again after {failure.error}: {failure.reason}")

    def on_cell_end(self, outcome: CellOutcome) -> None:
        """See `Observer`."""
        failure = outcome.failure
        words = f"{failure.error}: {failure.reason}" if failure else outcome.result.summary
        self._tell(f"{outcome.device}: {outcome.cell.label} is {outcome.status}: {words}")
        self._forget(outcome.cell)


def work(
    location: str,
    pool_file: Path | None,
    *,
    max_parallel: int | None = None,
    dead_after_s: float = DEAD_AFTER_S,
    builds: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Run cells and builds of the lab's queue until a KeyboardInterrupt.

    Those that run then are ended, and given to other workers.

    Args:
        location: URL of the database with results and queue.
        max_parallel: most devices at once.
        dead_after_s: a worker that was not heard of for so long is dead; the same for all.
        builds: folder that builds may write to; without it, they are left to other hosts.
        on_progress: called with a line for each cell.
    """
    models = ModelCache()
    with ExitStack() as stack:
        jobs = stack.enter_context(LabJobs(location))
        pool = stack.enter_context(Pool.open(pool_file, on_progress=on_progress))
        name, devices = socket.gethostname(), len(pool.members())
        jobs.register(name, devices)
        on_progress(f"worker {jobs.worker} serves {pluralize(devices, 'device')}")
        queue = LabQueue(jobs)
        journal = LabJournal(jobs, queue, name)
        outcomes = OutcomeLog({}, journal, Observer())
        outcomes.observer = observer = _Log(on_progress, outcomes.forget)
        options = MatrixOptions(max_parallel, float("inf"), "qnnfarm worker")
        runner = LabRunner(queue, jobs.store, models)

        def serve() -> None:
            scheduler = Scheduler(queue, outcomes, pool, runner, options, observer)
            queue.scheduler = scheduler
            scheduler.run()

        others = ExitStack()
        others.enter_context(_Heartbeat(journal, dead_after_s))
        if builds is not None:
            others.enter_context(Builder(jobs, builds, on_progress))
        try:
            while not _ends(serve):
                journal.give_back_all()
        finally:
            others.close()
            with suppress(StoreError):
                jobs.unregister()


def _ends(serve: Callable[[], None]) -> bool:
    """Serve until somebody ends it; False if a database went away meanwhile."""
    try:
        serve()
    except (StoreError, LedgerError) as error:
        log.warning("%s: trying again", error)
        time.sleep(PATIENCE_S)
        return False
    return True


class _Heartbeat(Service):
    """Shows that the worker lives, and ends the cells that somebody cancelled."""

    def __init__(self, journal: LabJournal, dead_after_s: float) -> None:
        self._journal = journal
        self._dead_after_s = dead_after_s
        super().__init__(dead_after_s / _BEATS)

    def _work(self) -> None:
        journal, queue = self._journal, self._journal.queue
        aborted = journal.jobs.beat(self._dead_after_s)
        jobs = dict(queue.taken)
        keys = [key for key, job in jobs.items() if job.job.id in aborted]
        journal.aborted |= aborted & {job.job.id for job in jobs.values() if job.job.id}
        if queue.scheduler is not None:
            queue.scheduler.interrupt(keys)
