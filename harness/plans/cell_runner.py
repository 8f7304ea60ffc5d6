"""Runs cells on leased devices, and stores their results."""

import hashlib
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.clock import Deadline
from harness.plans.cancellation import Guard, guarded
from harness.plans.cells import Cell
from harness.plans.outcome import CellResult
from harness.plans.protocols import LeasedDevice
from harness.pool.lease import LeasedDevice as PoolDevice
from harness.results.records import Run
from harness.results.store import ResultsStore, RunFilter
from harness.telemetry.conditions import Conditions
from harness.workloads.base import Recording, WorkloadResult, stored_result
from harness.workloads.session import Session, SessionOptions, meet_conditions


class ResultsLater:
    """A results database that is made when it is first written to. For several threads.

    Args:
        location: as `ResultsStore.open` has it. A database that exists is opened at once.
        must_exist: only read what an earlier run stored.

    Raises:
        MissingStoreError: it must exist, and does not.
        StoreError: it exists, and cannot be used.
    """

    def __init__(self, location: str, *, must_exist: bool = False) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._store: ResultsStore | None = None
        self._path = file_of(location)
        if must_exist or self._path is None or self._path.exists():
            self._store = ResultsStore.open(location, create=not must_exist)

    @property
    def location(self) -> str:
        """The path or URL, without its password; the same before it is made and after."""
        return str(self._path) if self._store is None else self._store.location

    @property
    def there(self) -> ResultsStore | None:
        """The database, if there is one yet."""
        return self._store

    def made(self) -> ResultsStore:
        """The database, made now where there is none."""
        with self._lock:
            if self._store is None:
                self._store = ResultsStore.open(self._location)
            return self._store

    def close(self) -> None:
        """Give up what connects to it."""
        with self._lock:
            if self._store is not None:
                self._store.close()


def file_of(location: str) -> Path | None:
    """The file of a SQLite database; `None` of another."""
    if "://" in location and not location.startswith("sqlite"):
        return None
    return Path(location.removeprefix("sqlite:///"))


_SWEEP_S = 30.0


class Containers:
    """Containers by their folders, each read once; for several threads."""

    def __init__(self) -> None:
        self._loaded: dict[Path, GenAIContainer] = {}
        self._loading = threading.Lock()

    def load(self, path: Path) -> GenAIContainer:
        """The container of a folder.

        Raises:
            BuildError: it is not whole.
        """
        with self._loading:
            if path not in self._loaded:
                self._loaded[path] = GenAIContainer.load(path)
            return self._loaded[path]


@dataclass(frozen=True, slots=True)
class DeviceCellRunner:
    """Runs cells on devices of the pool, and keeps their results in a store; `CellRunner`.

    Attributes:
        campaign: of the journal; what groups the sessions of a cell is derived from it.
        runner_s: for one process of the runner on a device.
        conditions: of benchmarks; `None` measures devices as they are.
        telemetry_hz: samples a second while a device generates; `None`: no telemetry.
    """

    store: ResultsLater
    containers: Containers
    campaign: str
    runner_s: float = 300.0
    conditions: Conditions | None = None
    telemetry_hz: float | None = None

    def run(self, cell: Cell, device: LeasedDevice, guard: Guard) -> CellResult:
        """Run one cell; see `CellRunner.run`."""
        session = Session(
            guarded(device, guard),
            None if cell.container is None else self.containers.load(cell.container),
            SessionOptions(
                timeout_s=cell.timeout_s,
                runner_timeout_s=self.runner_s,
                telemetry_hz=self.telemetry_hz,
                prepare=None
                if self.conditions is None
                else partial(meet_conditions, self.conditions),
                folder=cell.folder,
            ),
        )
        if not cell.workload.needs_container and isinstance(device, PoolDevice):
            device.dirty = True  # what a command leaves running ends with the lease
        try:
            with guard.ending(lambda: _end_all(device)):
                result = cell.workload.run(session, self._recording(cell, session))
        finally:
            # The clean-up runs on the device too, and is not to be ended with the rest.
            with guard.exempt():
                session.close()
        return _cell_result(result)

    def group_id(self, cell: Cell) -> str:
        """What the sessions of a cell share in the store, for as long as the plan goes on."""
        return hashlib.sha256(f"{self.campaign}:{cell.group}".encode()).hexdigest()[:32]

    def finished(self, cell: Cell) -> CellResult | None:
        """What the store holds of a cell that an earlier run of the plan has done.

        The store is asked, not the journal, so that a process killed between the two repeats
        nothing, and results that were deleted are measured again.
        """
        done = [run for run in self._done(cell) if run.session == cell.session]
        return _cell_result(stored_result(done[-1])) if done else None

    @property
    def has_results(self) -> bool:
        """Whether there is a database."""
        return self.store.there is not None

    def _recording(self, cell: Cell, session: Session) -> Recording:
        first: Run | None = None
        for run in self._done(cell):
            device = session.properties
            if (run.device.soc, run.device.emulator) == (device.soc, device.emulator):
                first = run
                break
        return Recording(self.store.made, self.group_id(cell), cell.session, cell.label, first)

    def _done(self, cell: Cell) -> tuple[Run, ...]:
        if not cell.workload.needs_container or self.store.there is None:
            return ()
        return self.store.there.list_runs(RunFilter(status="done", group_id=self.group_id(cell)))


def _end_all(device: LeasedDevice) -> None:
    """End what runs on a device of the pool under our lease."""
    if isinstance(device, PoolDevice):
        deadline = Deadline.for_device(device.serial, "ending a cell", _SWEEP_S)
        device.fence.sweep(device.unleased, deadline)


def _cell_result(result: WorkloadResult[object]) -> CellResult:
    run = result.run
    emulator = run is not None and run.device.emulator
    return CellResult(run.id if run else None, result.summary, result.values, emulator)
