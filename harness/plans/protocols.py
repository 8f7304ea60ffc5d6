"""Protocols of the scheduler: its queue, the pool, the runner of cells, and the observer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from harness.plans.cancellation import CancelToken
from harness.plans.cells import Cell
from harness.plans.outcome import CellOutcome, CellResult, Failure
from harness.pool.lease import Lease, LeasedDevice
from harness.pool.requirement import MemberStatus, Requirement


class DevicePool(Protocol):
    """Source of leases; implemented in `harness.pool`."""

    def members(self) -> Sequence[MemberStatus]:
        """Return the devices, as they are now."""
        ...

    def acquire(
        self, requirement: Requirement, *, purpose: str = "", cancelled: Callable[[], bool]
    ) -> Lease:
        """Wait for a lease, until `cancelled` returns True; it is called several times a second."""
        ...


class Queue(Protocol):
    """Cells that wait: of one plan in this process, or of all plans of a lab."""

    def __len__(self) -> int: ...

    def requirements(self) -> Sequence[tuple[Requirement, int]]:
        """Return requirements of waiting cells, each with the number of its cells."""
        ...

    def waiting(self, requirement: Requirement) -> Iterator[Cell]:
        """Yield cells that wait for a device of this requirement."""
        ...

    def take(
        self,
        fits: Callable[[Requirement], bool],
        allowed: Callable[[Cell], bool],
        *,
        affinity: str,
        devices: int,
    ) -> Cell | None:
        """Take the next cell for a device; `None` if none fits it."""
        ...

    def put(self, cell: Cell) -> None:
        """Add a cell that waits again."""
        ...

    def remove(self, cells: Iterable[Cell]) -> None:
        """Remove cells that will not run."""
        ...

    def learn(self, cell: Cell, seconds: float) -> None:
        """Learn how long a cell took, for others like it."""
        ...


class Recorder(Protocol):
    """Records how cells end, before anybody hears of it."""

    def record_start(self, key: str, device: str) -> None:
        """Record that a cell is being tried."""
        ...

    def record_ends(self, outcomes: Sequence[CellOutcome]) -> None:
        """Record how cells ended."""
        ...


class CellRunner(Protocol):
    """Runs one cell on one device."""

    def run(self, cell: Cell, device: LeasedDevice, cancel: CancelToken) -> CellResult:
        """Run it, and always leave nothing of it on the device.

        Another thread may cancel the cell, also while this waits for the device; this raises
        `CellInterrupted` then.
        """
        ...


class Observer:
    """Gets the events of a run, in the threads in which they happen; this one ignores them."""

    def on_cell_start(self, cell: Cell, device: str) -> None:
        """Tell that a device began with a cell."""

    def on_cell_retry(self, cell: Cell, device: str, failure: Failure) -> None:
        """Tell that a try failed, and that the cell waits for another."""

    def on_cell_end(self, outcome: CellOutcome) -> None:
        """Tell that a cell is done, failed or interrupted."""

    def on_no_device(self, outcomes: Sequence[CellOutcome]) -> None:
        """Tell that cells failed, all for the same reason: they will get no device."""

    def on_wait(self, requirement: str, reason: str) -> None:
        """Tell that cells wait for a device, or that the reason changed.

        Args:
            reason: the holders of the devices, or why they are out; empty: the wait is over.
        """

    def on_stop(self) -> None:
        """Tell that no more cells begin, and that those that run are being ended."""
