"""A plan on its way: its cells, its journal, its store and its pool, opened together."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import MissingStoreError, PlanFileError, WrongUseError
from harness.plans.cell_runner import Containers, DeviceCellRunner, ResultsLater, file_of
from harness.plans.cells import Cell
from harness.plans.journal import Journal, journal_path
from harness.plans.matrix import expand, resolve, select
from harness.plans.outcome import CellResult, Summary
from harness.plans.plan_file import Plan, load_plan
from harness.plans.protocols import Observer
from harness.plans.scheduler import MatrixOptions, run_matrix
from harness.pool.pool import Pool, find_config
from harness.pool.status import OnProgress, ignore_progress
from harness.results.records import new_run_id
from harness.telemetry.sampler import DEFAULT_HZ


@dataclass(frozen=True, slots=True)
class Campaign:
    """A plan that is about to be run, or is going on.

    Attributes:
        runner: `None` where it is only looked at, and there is no database yet.
        lost: cells that ran when an earlier run of the plan died.
        location: of the results.
        tell: told in words which devices are waited for, where looking for them lasts.
    """

    plan: Plan
    cells: tuple[Cell, ...]
    journal: Journal
    runner: DeviceCellRunner | None
    pool_file: Path | None
    pool: Pool | None
    done: dict[str, CellResult]
    lost: int
    location: str
    tell: OnProgress = ignore_progress

    @property
    def done_before(self) -> int:
        """Number of cells that earlier runs of the plan have done."""
        return len(self.done)

    @property
    def has_results(self) -> bool:
        """Whether there is a database: none is made before there is something to keep."""
        return self.runner is not None and self.runner.has_results

    def is_done(self, cell: Cell) -> bool:
        """Whether an earlier run has done it."""
        return cell.key in self.done

    def run(self, *, max_parallel: int | None = None, observer: Observer | None = None) -> Summary:
        """Run what is not done; see `run_matrix`.

        Raises:
            ValueError: it was opened to be looked at only, and there is no database yet.
        """
        if self.runner is None:
            raise ValueError("this plan was not begun")
        options = MatrixOptions(
            max_parallel, self.plan.timeouts.lease_s, f"qnnfarm run {self.plan.name}"
        )
        with ExitStack() as stack:
            pool = self.pool or stack.enter_context(Pool.open(self.pool_file, on_progress=self.tell))
            return run_matrix(
                self.cells,
                pool,
                self.runner,
                self.journal,
                options=options,
                observer=observer,
                finished=lambda cell: self.done.get(cell.key),
            )


@contextmanager
def open_campaign(
    plan_file: Path,
    *,
    db: str | None = None,
    pool_file: Path | None = None,
    only: Sequence[str] = (),
    fresh: bool = False,
    begin: bool = True,
    tell: OnProgress = ignore_progress,
) -> Iterator[Campaign]:
    """Read a plan and what became of it until now.

    Args:
        db: instead of the plan's; relative to the working folder.
        pool_file: instead of the plan's.
        only: patterns of the labels of the cells that matter.
        fresh: forget what was done.
        begin: whether it is going to be run; else nothing is written.
        tell: told in words which devices are waited for, where looking for them lasts.

    Raises:
        PlanFileError: the plan cannot be used.
        PoolConfigError: the pool's file cannot.
        WrongUseError: no cell has such a label.
        PlanBusyError: another process runs it.
    """
    plan = load_plan(plan_file)
    location = db if db is not None else _db_of(plan, plan_file)
    _check_folder(location, plan_file, by_option=db is not None)
    if pool_file is None and plan.pool is not None:
        pool_file = resolve(plan_file, plan.pool)
        if not pool_file.is_file():
            raise PlanFileError(str(plan_file), "pool", f"there is no file {pool_file}")
    find_config(pool_file)
    with ExitStack() as stack:
        pool = None
        if any(entry.count == "all" for entry in plan.devices):
            pool = stack.enter_context(Pool.open(pool_file, on_progress=tell))
        containers = Containers()
        cells = expand(
            plan,
            plan_file,
            identify=lambda path: containers.load(path).metadata.container_sha256,
            check=lambda path, workload: workload.check(containers.load(path)),
            members=lambda: pool.members() if pool is not None else (),
        )
        cells = select(cells, only)
        if not cells:
            raise WrongUseError(f"no cell of {plan_file} matches {' or '.join(only)}")
        try:
            store = stack.enter_context(
                contextlib.closing(ResultsLater(location, must_exist=not begin))
            )
        except MissingStoreError as error:
            location = error.location  # without its password
            path = journal_path(plan.name, plan_file, location)
            yield Campaign(plan, cells, Journal(path), None, pool_file, pool, {}, 0, location)
            return
        path = journal_path(plan.name, plan_file, store.location)
        journal = stack.enter_context(Journal(path))
        if begin:
            journal.begin(plan.name, new_run_id(), fresh=fresh)
        runner = DeviceCellRunner(
            store,
            containers,
            journal.campaign,
            runner_s=plan.timeouts.runner_s,
            conditions=None if plan.conditions == "none" else plan.conditions.conditions(),
            telemetry_hz=DEFAULT_HZ if plan.telemetry else None,
        )
        found = {} if fresh else {c.key: _finished(c, journal, runner) for c in cells}
        done = {key: result for key, result in found.items() if result is not None}
        lost = sum(key not in done for key in journal.lost() & found.keys())
        yield Campaign(
            plan, cells, journal, runner, pool_file, pool, done, lost, store.location, tell
        )


def _finished(cell: Cell, journal: Journal, runner: DeviceCellRunner) -> CellResult | None:
    """What earlier runs of the plan have of a cell; the store knows all but plain commands."""
    known = journal.remembered(cell.key)
    if known is None:
        return None
    if cell.workload.needs_container:
        return runner.finished(cell)
    return known.result if known.status == "done" else None


def _check_folder(location: str, plan_file: Path, *, by_option: bool) -> None:
    """Refuse a database in a folder that is not there, before anything is measured."""
    path = file_of(location)
    if path is None or path.absolute().parent.is_dir():
        return
    reason = f"there is no folder {path.absolute().parent}"
    if by_option:
        raise WrongUseError(f"--db: {reason}")
    raise PlanFileError(str(plan_file), "db", reason)


def _db_of(plan: Plan, plan_file: Path) -> str:
    if plan.db is None:
        raise PlanFileError(str(plan_file), "db", "name a results database here, or by --db")
    return plan.db if "://" in plan.db else str(resolve(plan_file, plan.db))
