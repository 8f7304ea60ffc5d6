"""Attempts at cells, and the log of the outcome of each cell."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.plans.cancellation import CancelToken
from harness.plans.cells import Cell
from harness.plans.outcome import CellOutcome, CellResult, CellStatus, Failure
from harness.plans.protocols import Observer, Recorder
from harness.pool.failure_policy import Work
from harness.pool.lease import LeasedDevice


@dataclass(slots=True)
class Attempt:
    """One try of a cell on a device, which another thread may cancel.

    Attributes:
        began: seconds since 1970.
        is_expiring: whether it took too long and is being cancelled.
    """

    cell: Cell
    device: LeasedDevice
    cancel: CancelToken = field(default_factory=CancelToken)
    start: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.time)
    is_expiring: bool = False

    @property
    def work(self) -> Work:
        """Its work, as the pool knows it."""
        return Work(self.cell.work, f"cell {self.cell.label}", self.began)

    def elapsed_s(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self.start

    def is_overdue(self) -> bool:
        """Return whether it took too long, and nothing cancels it yet."""
        return not self.is_expiring and self.elapsed_s() > self.cell.timeout_s

    def expire(self) -> None:
        """Cancel it because it took too long; waits for the device."""
        action = f"cell {self.cell.label}"
        self.cancel.expire(self.device.serial, action, self.cell.timeout_s)


class OutcomeLog:
    """Outcomes of one run's cells. Thread-safe.

    An outcome goes into the journal first, then here, then to the observer.
    """

    def __init__(
        self, outcomes: Mapping[str, CellOutcome], journal: Recorder, observer: Observer
    ) -> None:
        self._outcomes = dict(outcomes)
        self._journal = journal
        self.observer = observer
        self._lock = threading.Lock()

    @property
    def outcomes(self) -> Sequence[CellOutcome]:
        """All outcomes as they are now, in the plan's order."""
        with self._lock:
            return tuple(self._outcomes.values())

    def start(self, attempt: Attempt) -> None:
        """Log that a device begins with a cell."""
        member = attempt.device.member
        self._journal.record_start(attempt.cell.key, member)
        self.observer.on_cell_start(attempt.cell, member)

    def finish(self, attempt: Attempt, result: CellResult) -> None:
        """Log the result of a cell."""
        self.end(replace(self._ended(attempt, "done"), result=result))

    def interrupt(self, attempt: Attempt) -> None:
        """Log that a cell was cut short because the whole run ends."""
        self.end(self._ended(attempt, "interrupted"))

    def failure_outcome(self, attempt: Attempt, error: Exception, blame: str) -> CellOutcome:
        """Give the outcome of a cell if it is not tried again; `blame` as in `Failure.of`."""
        outcome = self._failed(attempt.cell, attempt.device.member, error, blame)
        return replace(outcome, duration_s=attempt.elapsed_s())

    def retry(self, outcome: CellOutcome) -> None:
        """Log that a failed cell will be tried again."""
        member, failure = outcome.failures[-1]
        self.observer.on_cell_retry(outcome.cell, member, failure)
        with self._lock:
            self._outcomes[outcome.cell.key] = replace(outcome, status="left")

    def fail_without_device(self, cells: Sequence[Cell], error: Exception) -> None:
        """Log that cells will get no device."""
        outcomes = [self._failed(cell, "", error) for cell in cells]
        if outcomes:
            self._record(outcomes)
            self.observer.on_no_device(outcomes)

    def forget(self, cell: Cell) -> None:
        """Drop the outcome of a cell, in a run that has no end."""
        with self._lock:
            self._outcomes.pop(cell.key, None)

    def _current(self, cell: Cell) -> CellOutcome:
        with self._lock:
            return self._outcomes.get(cell.key) or CellOutcome(cell)

    def _ended(self, attempt: Attempt, status: CellStatus) -> CellOutcome:
        member, elapsed_s = attempt.device.member, attempt.elapsed_s()
        return replace(
            self._current(attempt.cell), status=status, device=member, duration_s=elapsed_s
        )

    def _failed(self, cell: Cell, member: str, error: Exception, blame: str = "") -> CellOutcome:
        outcome = self._current(cell)
        failures = (*outcome.failures, (member, Failure.of(error, cell.workload, blame)))
        return replace(outcome, status="failed", device=member, failures=failures)

    def end(self, outcome: CellOutcome) -> None:
        """Log the last outcome of a cell."""
        self._record([outcome])
        self.observer.on_cell_end(outcome)

    def _record(self, outcomes: Sequence[CellOutcome]) -> None:
        self._journal.record_ends(outcomes)
        with self._lock:
            self._outcomes.update({outcome.cell.key: outcome for outcome in outcomes})
