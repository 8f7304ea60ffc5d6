"""Attempts at cells, and the log of what became of each: journal first, then observers."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.plans.cancellation import Guard
from harness.plans.cells import Cell
from harness.plans.journal import Journal
from harness.plans.outcome import CellOutcome, CellResult, CellStatus, Failure
from harness.plans.protocols import LeasedDevice, Observer


@dataclass(slots=True)
class Attempt:
    """A cell on its device, since it was put there.

    Attributes:
        expired: whether somebody ends it already, for it took too long.
    """

    cell: Cell
    device: LeasedDevice
    guard: Guard = field(default_factory=Guard)
    began: float = field(default_factory=time.monotonic)
    expired: bool = False

    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def is_overdue(self) -> bool:
        """Whether it took too long, and nobody ends it yet."""
        return not self.expired and self.elapsed_s() > self.cell.timeout_s

    def expire(self) -> None:
        """Cut it short because it took too long; waits for the device."""
        action = f"cell {self.cell.label}"
        self.guard.expire(self.device.serial, action, self.cell.timeout_s)


class Tally:
    """The outcomes of one run's cells. For several threads."""

    def __init__(
        self, outcomes: Mapping[str, CellOutcome], journal: Journal, observer: Observer
    ) -> None:
        self._outcomes = dict(outcomes)
        self._journal = journal
        self._observer = observer
        self._lock = threading.Lock()

    @property
    def outcomes(self) -> Sequence[CellOutcome]:
        """All as they are now, in the plan's order."""
        with self._lock:
            return tuple(self._outcomes.values())

    def begun(self, attempt: Attempt) -> None:
        """A device begins with a cell."""
        member = attempt.device.member
        self._journal.cell_begun(attempt.cell.key, member)
        self._observer.cell_begun(attempt.cell, member)

    def done(self, attempt: Attempt, result: CellResult) -> None:
        """A cell gave its result."""
        self._end(replace(self._ended(attempt, "done"), result=result))

    def interrupted(self, attempt: Attempt) -> None:
        """A cell was cut short, for the whole run ends."""
        self._end(self._ended(attempt, "interrupted"))

    def with_failure(self, attempt: Attempt, error: Exception) -> CellOutcome:
        """What a cell comes to if it is not tried again."""
        outcome = self._failed(attempt.cell, attempt.device.member, error)
        return replace(outcome, duration_s=attempt.elapsed_s())

    def retried(self, outcome: CellOutcome) -> None:
        """A cell that failed will be tried again."""
        member, failure = outcome.failures[-1]
        self._observer.cell_retried(outcome.cell, member, failure)
        with self._lock:
            self._outcomes[outcome.cell.key] = replace(outcome, status="left")

    def failed(self, outcome: CellOutcome) -> None:
        """A cell that failed will not be tried again."""
        self._end(outcome)

    def without_device(self, cells: Sequence[Cell], error: Exception) -> None:
        """Cells will get no device."""
        outcomes = [self._failed(cell, "", error) for cell in cells]
        if outcomes:
            self._keep(outcomes)
            self._observer.without_device(outcomes)

    def _known(self, cell: Cell) -> CellOutcome:
        with self._lock:
            return self._outcomes[cell.key]

    def _ended(self, attempt: Attempt, status: CellStatus) -> CellOutcome:
        member, elapsed_s = attempt.device.member, attempt.elapsed_s()
        return replace(
            self._known(attempt.cell), status=status, device=member, duration_s=elapsed_s
        )

    def _failed(self, cell: Cell, member: str, error: Exception) -> CellOutcome:
        known = self._known(cell)
        failures = (*known.failures, (member, Failure.of(error, cell.workload)))
        return replace(known, status="failed", device=member, failures=failures)

    def _end(self, outcome: CellOutcome) -> None:
        self._keep([outcome])
        self._observer.cell_ended(outcome)

    def _keep(self, outcomes: Sequence[CellOutcome]) -> None:
        self._journal.cells_ended(outcomes)
        with self._lock:
            self._outcomes.update({outcome.cell.key: outcome for outcome in outcomes})
