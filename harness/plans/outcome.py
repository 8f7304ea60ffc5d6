"""Outcomes of cells, and their summary."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.errors import (
    BAD,
    GOOD,
    INTERRUPTED,
    NO_ANSWER,
    DeviceCommandError,
    FailureClass,
    HarnessError,
    one_line,
)
from harness.plans.cells import Cell
from harness.workloads.registry import AnyWorkload


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a try failed.

    Attributes:
        error: name of the error's class.
        reason: its text, one line.
    """

    kind: FailureClass
    error: str
    reason: str

    @classmethod
    def of(cls, error: Exception, workload: AnyWorkload, blame: str = "") -> "Failure":
        """Make one from an error raised on purpose.

        Args:
            blame: why it counts against the cell rather than its device; empty if it does not.
        """
        kind, reason = FailureClass.USE, str(error)
        if isinstance(error, DeviceCommandError) and not workload.needs_container:
            kind = FailureClass.OUTPUT  # the plan's own command failed, not one that deploys, say
        elif isinstance(error, HarnessError):
            kind = error.failure_class
        if blame:
            kind = FailureClass.RUNNER if kind is FailureClass.DEVICE else kind
            reason = f"{reason}; {blame}: the cell is at fault, not the devices"
        return cls(kind, type(error).__name__, one_line(reason, 1000))


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of a cell that succeeded.

    Attributes:
        run_id: of the results store; `None` for a plain command, which measures nothing.
        summary: for people, a few words: `prefill 12.3 tokens/s`.
        values: means by metric.
        emulator: whether they are an emulator's, which says nothing about hardware speed.
    """

    run_id: str | None = None
    summary: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    emulator: bool = False


_DEVICES = {FailureClass.DEVICE, FailureClass.LEASE}
CellStatus = Literal["done", "failed", "interrupted", "left"]


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """Outcome of a cell.

    Attributes:
        status: `left` if it did not run.
        resumed: whether an earlier run of the plan did it.
        device: name, in the pool, of the last device that it ran on.
        failures: of all tries, oldest first, with their devices; also those before a success.
        duration_s: of the last try, with deployment and clean-up.
    """

    cell: Cell
    status: CellStatus = "left"
    resumed: bool = False
    device: str = ""
    result: CellResult = CellResult()
    failures: tuple[tuple[str, Failure], ...] = ()
    duration_s: float = 0.0

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""
        return self.failures[-1][1] if self.status == "failed" and self.failures else None

    def as_mapping(self) -> Mapping[str, object]:
        """Return the outcome in JSON answers."""
        return {
            "cell": self.cell.label,
            "key": self.cell.key,
            "kind": self.cell.workload.kind,
            "status": self.status,
            "resumed": self.resumed,
            "device": self.device or None,
            "run_id": self.result.run_id,
            "values": dict(self.result.values),
            "emulator": self.result.emulator,
            "duration_s": round(self.duration_s, 3),
            "failures": [
                {"device": device or None, **dataclasses.asdict(failure)}
                for device, failure in self.failures
            ],
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcomes of a run of a plan, in the plan's order.

    Attributes:
        elapsed_s: from the first lease request to the last release.
    """

    outcomes: Sequence[CellOutcome]
    elapsed_s: float
    interrupted: bool

    def __str__(self) -> str:
        """Return `3 done, 1 failed, 0 left in 12.3 s`, after `interrupted: ` if it was."""
        rest = self.count("left") + self.count("interrupted")
        prefix = "interrupted: " if self.interrupted else ""
        counts = f"{self.count('done')} done, {self.count('failed')} failed, {rest} left"
        return f"{prefix}{counts} in {self.elapsed_s:.1f} s"

    def count(self, status: CellStatus) -> int:
        """Count the cells that ended so."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """130: interrupted; 0: all done; 2: all that failed did so by their devices; else 1."""
        if self.interrupted:
            return INTERRUPTED
        if self.count("done") == len(self.outcomes):
            return GOOD
        failures = [o.failure for o in self.outcomes if o.status == "failed"]
        only_devices = all(f is not None and f.kind in _DEVICES for f in failures)
        if failures and only_devices and not self.count("done"):
            return NO_ANSWER
        return BAD
