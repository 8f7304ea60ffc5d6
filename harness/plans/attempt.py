"""One try of a cell on a device, which another thread may cut short."""

import time
from dataclasses import dataclass, field

from harness.plans.cells import Cell
from harness.plans.guard import Guard
from harness.plans.seams import LeasedDevice


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
