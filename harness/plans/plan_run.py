"""A run of a plan: its cells, journal, results and pool, opened together."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigFileError, MissingStoreError, WrongUseError
from harness.plans.cell_runner import DeviceCellRunner, ModelCache, PlanSettings
from harness.plans.cells import Cell
from harness.plans.journal import Journal, journal_path
from harness.plans.matrix import expand, resolve_path, select
from harness.plans.outcome import CellResult, Summary
from harness.plans.plan_file import Plan, load_plan
from harness.plans.protocols import Observer
from harness.plans.scheduler import MatrixOptions, run_matrix
from harness.pool.notifications import Notification
from harness.pool.pool import Pool, find_config
from harness.pool.status import MemberStatus, OnProgress, ignore_progress
from harness.results.database import database_file
from harness.results.records import new_run_id
from harness.results.store import LazyResultsStore
from harness.runtimes.bundles.bundle import pushed_files


@dataclass(frozen=True, slots=True)
class PlanRun:
    """An opened plan.

    Attributes:
        runner: `None` in a dry run without a database.
        done: results of earlier runs of the plan, by the cell's key.
        lost: number of cells that ran when an earlier run of the plan died.
        location: of the results.
        on_progress: called with notices of the pool, while it looks for devices.
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
    on_progress: OnProgress = ignore_progress

    @property
    def done_before(self) -> int:
        """Number of cells that earlier runs of the plan have done."""
        return len(self.done)

    @property
    def has_results(self) -> bool:
        """True if there is a database; none is made before there is something to keep."""
        return self.runner is not None and self.runner.store.existing is not None

    @property
    def logs(self) -> Path | None:
        """Folder with the devices' logs of failed tries; `None` if there are none."""
        folder = None if self.runner is None else self.runner.logs
        return folder if folder is not None and folder.is_dir() else None

    def run(self, *, max_parallel: int | None = None, observer: Observer | None = None) -> Summary:
        """Run the cells that are not done, unless it was opened as a dry run; see `run_matrix`."""
        if self.runner is None:
            raise ValueError("this is a dry run")
        options = MatrixOptions(
            max_parallel, self.plan.timeouts.lease_s, f"qnnfarm run {self.plan.name}"
        )
        with ExitStack() as stack:
            pool = self.pool or stack.enter_context(
                Pool.open(self.pool_file, on_progress=self.on_progress)
            )
            summary = run_matrix(
                self.cells,
                pool,
                self.runner,
                self.journal,
                options=options,
                observer=observer,
                stored_result=lambda cell: self.done.get(cell.key),
            )
            text = f"plan {self.plan.name}: {summary}; results in {self.location}"
            pool.notify(Notification("plan_finished", self.plan.name, text))
        return summary


@contextmanager
def open_plan_run(
    plan_file: Path,
    *,
    db: str | None = None,
    pool_file: Path | None = None,
    only: Sequence[str] = (),
    fresh: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress = ignore_progress,
    plan: Plan | None = None,
) -> Iterator[PlanRun]:
    """Open a plan with the results of earlier runs of it.

    Args:
        db: overrides the plan's; relative to the working folder.
        pool_file: overrides the plan's.
        only: select cells by patterns of their labels.
        fresh: forget these results.
        dry_run: write nothing.
        on_progress: called with notices of the pool, while it looks for devices.
        plan: content of the file; read from it by default.
    """
    plan = plan or load_plan(plan_file)
    location = find_database(plan, plan_file, db)
    if pool_file is None and plan.pool is not None:
        pool_file = resolve_path(plan_file, plan.pool)
        if not pool_file.is_file():
            raise ConfigFileError(str(plan_file), None, "pool", f"there is no file {pool_file}")
    find_config(pool_file)
    with ExitStack() as stack:
        pool, models = None, ModelCache()
        members: Callable[[], Sequence[MemberStatus]] = list
        if any(entry.count == "all" for entry in plan.devices):
            pool = stack.enter_context(Pool.open(pool_file, on_progress=on_progress))
            members = pool.members
        cells = find_cells(plan, plan_file, models, only, members)
        try:
            store = LazyResultsStore(location, must_exist=dry_run)
        except MissingStoreError as error:
            location = error.location  # without its password
            path = journal_path(plan.name, plan_file, location)
            yield PlanRun(plan, cells, Journal(path), None, pool_file, pool, {}, 0, location)
            return
        stack.enter_context(store)
        path = journal_path(plan.name, plan_file, store.location)
        logs = path.with_suffix(".logs")
        journal = stack.enter_context(Journal(path))
        if not dry_run:
            journal.begin(plan.name, new_run_id(), fresh=fresh)
            if fresh:
                shutil.rmtree(logs, ignore_errors=True)
        push = pushed_files(plan.push, plan_file.parent)
        settings = PlanSettings.of(plan)
        runner = DeviceCellRunner(store, models, journal.plan_run_id, settings, logs, push)
        results = {} if fresh else _earlier_results(cells, journal, runner)
        lost_keys = set() if fresh else journal.lost() - results.keys()
        lost = sum(cell.key in lost_keys for cell in cells)
        location = store.location
        yield PlanRun(
            plan, cells, journal, runner, pool_file, pool, results, lost, location, on_progress
        )


def find_cells(
    plan: Plan,
    plan_file: Path,
    models: ModelCache,
    only: Sequence[str],
    members: Callable[[], Sequence[MemberStatus]],
) -> tuple[Cell, ...]:
    """Return the cells of a plan; see `expand` and `select`."""
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
    return cells


def _earlier_results(
    cells: Iterable[Cell], journal: Journal, runner: DeviceCellRunner
) -> dict[str, CellResult]:
    """Return results of an earlier run by the cells' keys; the store lacks plain commands'."""
    entries = [(cell, entry) for cell in cells if (entry := journal.entry(cell.key))]
    commands = {
        cell.key: entry.result
        for cell, entry in entries
        if entry.status == "done" and not cell.workload.needs_container
    }
    return {**commands, **runner.stored_results(cell for cell, _ in entries)}


def find_database(plan: Plan, plan_file: Path, db: str | None = None) -> str:
    """Return the location of a plan's results, or of those that override it.

    Args:
        db: overrides the plan's; relative to the working folder.
    """
    if db is None and plan.db is None:
        reason = "name a results database here, or by --db"
        raise ConfigFileError(str(plan_file), None, "db", reason)
    location = plan.db or "" if db is None else db
    if db is None and "://" not in location:
        location = str(resolve_path(plan_file, location))
    path = database_file(location)
    if path is not None and not path.absolute().parent.is_dir():
        reason = f"there is no folder {path.absolute().parent}"
        if db is not None:
            raise WrongUseError(f"--db: {reason}")
        raise ConfigFileError(str(plan_file), None, "db", reason)
    return location
