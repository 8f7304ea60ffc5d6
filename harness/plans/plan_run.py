"""A run of a plan: its cells, journal, results and pool, opened together."""

import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from harness.devices.socket_owner import user_name
from harness.errors import ConfigFileError, HostFileError, MissingStoreError, WrongUseError
from harness.paths import state_dir
from harness.plans.cell_runner import DeviceCellRunner, ModelCache, PlanSettings
from harness.plans.cells import Cell
from harness.plans.journal import Journal
from harness.plans.matrix import expand, resolve_path, select
from harness.plans.outcome import CellOutcome, Summary
from harness.plans.plan_file import Plan, load_plan
from harness.plans.protocols import Observer
from harness.plans.scheduler import MatrixOptions, run_matrix
from harness.pool.notifications import Notification
from harness.pool.pool import Pool, find_config
from harness.pool.requirement import MemberStatus, OnProgress, ignore_progress
from harness.results.database import database_file, shown
from harness.results.records import to_storable
from harness.results.store import ResultsStore
from harness.runtimes.bundles.bundle import pushed_files


@dataclass(frozen=True, slots=True)
class PlanRun:
    """An opened plan.

    Attributes:
        journal, runner: `None` in a dry run without a database.
        done: outcomes of earlier runs of the plan, by the cell's key.
        lost: number of cells that ran when an earlier run of the plan died.
        location: of the results.
        on_progress: called with notices of the pool, while it looks for devices.
    """

    plan: Plan
    cells: tuple[Cell, ...]
    pool_file: Path | None
    pool: Pool | None
    location: str
    on_progress: OnProgress = ignore_progress
    journal: Journal | None = None
    runner: DeviceCellRunner | None = None
    done: Mapping[str, CellOutcome] = field(default_factory=dict)
    lost: int = 0

    @property
    def done_before(self) -> int:
        """Number of cells that earlier runs of the plan have done."""
        return len(self.done)

    @property
    def id(self) -> str:
        """Id of the run, which stays the same until a fresh start."""
        return self.journal.plan_run_id if self.journal else ""

    @property
    def logs(self) -> Path | None:
        """Folder with the devices' logs of failed tries; `None` if there are none."""
        folder = None if self.runner is None else self.runner.logs
        return folder if folder is not None and folder.is_dir() else None

    def run(self, *, max_parallel: int | None = None, observer: Observer | None = None) -> Summary:
        """Run the cells that are not done, unless it was opened as a dry run; see `run_matrix`."""
        if self.runner is None or self.journal is None:
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
                done=self.done,
                durations=self.journal.durations,
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
        place = _place(plan_file, location)
        path = _state_path(plan.name, place, location)
        if not dry_run:
            stack.enter_context(_only_run(path.with_name(f"{path.name}.lock")))
        try:
            store = stack.enter_context(ResultsStore.open(location, create=not dry_run))
        except MissingStoreError as error:  # which has the location without its password
            yield PlanRun(plan, cells, pool_file, pool, error.location)
            return
        journal = Journal(store.database, plan.name, place)
        logs = path.with_name(f"{path.name}.logs")
        if not dry_run:
            stack.enter_context(store.database.kept_open())
            journal.begin(fresh=fresh)
            if fresh:
                shutil.rmtree(logs, ignore_errors=True)
        push = pushed_files(plan.push, plan_file.parent)
        settings = PlanSettings.of(plan)
        runner = DeviceCellRunner(store, models, journal.plan_run_id, settings, logs, push)
        done = {} if fresh else runner.earlier_outcomes(cells, journal.ends)
        begun = {key for key, end in journal.ends.items() if end.status == "begun"} - done.keys()
        lost = sum(cell.key in begun for cell in cells)
        yield PlanRun(
            plan, cells, pool_file, pool, store.location, on_progress, journal, runner, done, lost
        )


def _place(plan_file: Path, location: str) -> str:
    """Say who runs a plan from which file: whoever else runs it begins a run of their own."""
    user = user_name(os.getuid())
    shared = database_file(location) is None
    place = f"{user}{f'@{platform.node()}' if shared else ''}:{plan_file.absolute()}"
    return str(to_storable(place))


def _state_path(name: str, place: str, location: str) -> Path:
    identity = f"{place}\0{shown(location)}".encode("utf-8", "surrogateescape")
    return state_dir() / "plans" / f"{name}-{hashlib.sha256(identity).hexdigest()[:16]}"


@contextmanager
def _only_run(path: Path) -> Iterator[None]:
    """Lock a plan, which one process at a time runs; `WrongUseError` if another does."""
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        reason = "another `qnnfarm run` works on this plan and database: wait for it, or stop it"
        raise WrongUseError(reason) from error
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error
    try:
        yield
    finally:
        lock.release()


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
