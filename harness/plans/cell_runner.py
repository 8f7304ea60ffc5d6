"""Runs cells on leased devices, and stores their results."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.clock import Deadline
from harness.deploy.deployment import DeployFile
from harness.errors import FailureClass, HarnessError
from harness.paths import safe_file_name
from harness.plans.cancellation import CancelToken, cancellable
from harness.plans.cells import Cell
from harness.plans.journal import CellEnd
from harness.plans.outcome import CellOutcome, CellResult
from harness.plans.plan_file import ConditionsEntry, Plan
from harness.pool.lease import LeasedDevice
from harness.results.records import Run, now
from harness.results.store import ResultsStore, RunFilter
from harness.runtimes.base import LogLevel, Model
from harness.runtimes.registry import DEFAULT_RUNTIME, open_model
from harness.telemetry.conditions import meet_conditions
from harness.telemetry.device_log import read_device_log
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.base import Recording, WorkloadResult, stored_result
from harness.workloads.session import Session, SessionOptions

_SWEEP_S = 30.0
_MOST_ASKED = 500
"""Cells whose results one query asks for."""


class ModelCache:
    """Models by path and runtime, each opened once. Thread-safe."""

    def __init__(self) -> None:
        self._models: dict[tuple[Path, str], tuple[object, Model]] = {}
        self._lock = threading.Lock()

    def open(self, path: Path, runtime: str = DEFAULT_RUNTIME) -> Model:
        """Open a model, again if it was replaced meanwhile; see `open_model`."""
        with self._lock:
            now = path.stat() if path.exists() else None
            identity = now and (now.st_ino, now.st_mtime_ns, now.st_size)
            before, model = self._models.get((path, runtime), (None, None))
            if model is None or before != identity:
                model = open_model(path, runtime)
                self._models[path, runtime] = identity, model
            return model


class PlanSettings(BaseModel):
    """Settings of a plan that its cells need wherever they run; see `Plan`.

    Attributes:
        plan: its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str | None = None
    runner_timeout_s: float | None = None
    conditions: ConditionsEntry | None = None
    telemetry: bool = False
    log_level: LogLevel | None = None
    trace: bool = False
    labels: Mapping[str, str] = {}

    @classmethod
    def of(cls, plan: Plan) -> "PlanSettings":
        """Return those of a plan."""
        return cls(
            plan=plan.name,
            runner_timeout_s=plan.timeouts.runner_s,
            conditions=None if plan.conditions == "none" else plan.conditions,
            telemetry=plan.telemetry,
            log_level=plan.log_level,
            trace=plan.trace,
            labels=plan.labels,
        )


@dataclass(frozen=True, slots=True)
class DeviceCellRunner:
    """Runs cells on devices of the pool, and stores their results; a `CellRunner`.

    Attributes:
        plan_run_id: the journal's; the group of a cell's sessions in the store derives from it.
        logs: folder for the devices' logs of failed tries that store no run; `None` keeps none.
        push: see `SessionOptions`.
    """

    store: ResultsStore
    models: ModelCache
    plan_run_id: str
    settings: PlanSettings = field(default_factory=PlanSettings)
    logs: Path | None = None
    push: Mapping[str, DeployFile] = field(default_factory=dict)

    def run(self, cell: Cell, device: LeasedDevice, cancel: CancelToken) -> CellResult:
        """See `CellRunner`."""
        start, began = time.monotonic(), now()
        try:
            return self._run(cell, device, cancel)
        except HarnessError as error:
            lost = error.loses_device or error.failure_class is FailureClass.USE
            if not (lost or self.failed_run(cell, since=began)):  # a stored run has its logs
                with cancel.shield():
                    self._keep_logs(cell, device, time.monotonic() - start, error)
            raise

    def _keep_logs(
        self, cell: Cell, device: LeasedDevice, seconds: float, failure: HarnessError
    ) -> None:
        """Keep the device's logs of a try; the newest try on a device replaces others."""
        if self.logs is None:
            return
        name = f"{safe_file_name(cell.label)}-{cell.key[:8]}"
        folder = self.logs / name / safe_file_name(device.member)
        texts = {"failure": f"{failure}\n", **read_device_log(device, seconds)}
        with contextlib.suppress(OSError):  # such as a full disk; the failure is what counts
            folder.mkdir(parents=True, exist_ok=True)
            for title, text in texts.items():
                (folder / f"{title}.txt").write_text(text, encoding="utf-8", errors="replace")

    def _run(self, cell: Cell, device: LeasedDevice, cancel: CancelToken) -> CellResult:
        settings = self.settings
        session = Session(
            cancellable(device, cancel),
            None if cell.container is None else self.models.open(cell.container, cell.runtime),
            SessionOptions(
                timeout_s=cell.timeout_s,
                runner_timeout_s=settings.runner_timeout_s,
                telemetry_hz=DEFAULT_HZ if settings.telemetry else None,
                log_level=settings.log_level,
                trace=settings.trace,
                push=self.push,
                prepare=None
                if settings.conditions is None
                else partial(meet_conditions, settings.conditions.conditions()),
                folder=cell.folder,
            ),
        )
        if not cell.workload.needs_container:
            device.dirty = True  # processes that a command leaves end with the lease
        try:
            with cancel.on_cancel(lambda: _end_processes(device)):
                result = cell.workload.run(session, self._recording(cell, session, cancel))
        finally:
            with cancel.shield():
                session.close()
        if result.run is not None and result.run.status != "done":
            return self.stored_result(cell) or _cell_result(result)  # another try was sooner
        return _cell_result(result)

    def group_id(self, cell: Cell) -> str:
        """Return the group of the cell's sessions in the store, which resuming a plan keeps."""
        return hashlib.sha256(f"{self.plan_run_id}:{cell.group}".encode()).hexdigest()[:32]

    def earlier_outcomes(
        self, cells: Collection[Cell], ends: Mapping[str, CellEnd]
    ) -> dict[str, CellOutcome]:
        """Return the outcomes of cells that earlier runs of the plan have done, by their keys.

        Args:
            ends: of the journal; it alone knows the results of commands, which store none.
        """
        results = dict(self.stored_results(cells))
        for cell in cells:
            if not _is_stored(cell) and (end := ends.get(cell.key)) and end.status == "done":
                results[cell.key] = CellResult(summary=end.summary)
        outcomes = {}
        for cell in cells:
            if cell.key in results:
                end, result = ends.get(cell.key, CellEnd("done")), results[cell.key]
                ended = CellOutcome(cell, "done", resumed=True, device=end.where, result=result)
                outcomes[cell.key] = replace(ended, duration_s=end.duration_s)
        return outcomes

    def stored_results(self, cells: Iterable[Cell]) -> Mapping[str, CellResult]:
        """Return the results, by their keys, of cells that an earlier run of the plan stored.

        The store is asked, not the journal, so that a process killed between the two repeats
        nothing, and results that were deleted are measured again.
        """
        by_run = {(self.group_id(cell), cell.session): cell for cell in cells if _is_stored(cell)}
        pairs, results = list(by_run), dict[str, CellResult]()
        for start in range(0, len(pairs), _MOST_ASKED):
            groups, sessions = map(set, zip(*pairs[start : start + _MOST_ASKED], strict=True))
            done = RunFilter(status="done", group_ids=groups, sessions=sessions)
            for stored in self.store.list_runs(done):
                cell = by_run.get((stored.group_id, stored.session))
                if cell is not None:
                    results[cell.key] = _cell_result(stored_result(stored))
        return results

    def stored_result(self, cell: Cell) -> CellResult | None:
        """Return the result of a cell that an earlier run of the plan stored, if any did."""
        return self.stored_results([cell]).get(cell.key)

    def failed_run(self, cell: Cell, *, since: datetime | None = None) -> Run | None:
        """Return the run of the cell's newest failed try, if it was stored."""
        groups, sessions = [self.group_id(cell)], [cell.session]
        failures = RunFilter(status="failed", group_ids=groups, sessions=sessions, since=since)
        return next(reversed(self.store.list_runs(failures)), None) if _is_stored(cell) else None

    def _recording(self, cell: Cell, session: Session, cancel: CancelToken) -> Recording:
        group_id, first = self.group_id(cell), None
        if _is_stored(cell):  # a command pays for no look at the device's properties
            soc, emulator = session.properties.soc, session.properties.emulator
            same = RunFilter(status="done", group_ids=[group_id], soc=soc, emulator=emulator)
            first = next(iter(self.store.list_runs(same)), None)
        return Recording(
            lambda: self.store,
            group_id,
            cell.session,
            cell.label,
            first,
            labels=self.settings.labels,
            plan=self.settings.plan,
            shield=cancel.shield,
        )


def _is_stored(cell: Cell) -> bool:
    return cell.workload.needs_container


def _end_processes(device: LeasedDevice) -> None:
    deadline = Deadline.for_device(device.serial, "ending a cell", _SWEEP_S)
    device.fence.sweep(deadline)


def _cell_result(result: WorkloadResult[object]) -> CellResult:
    stored = result.run
    emulator = stored is not None and stored.device.emulator
    return CellResult(stored.id if stored else None, result.summary, result.values, emulator)
