"""What the scheduler needs of others: a pool, something that runs a cell, somebody who watches."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from harness.devices.base import Device
from harness.errors import HarnessError
from harness.plans.cancellation import Guard
from harness.plans.cells import Cell
from harness.plans.outcome import CellOutcome, CellResult, Failure
from harness.pool.requirement import Requirement
from harness.pool.status import MemberStatus


class LeasedDevice(Device, Protocol):
    """The device of a lease."""

    @property
    def member(self) -> str:
        """The pool's name of it."""
        ...


class Lease(Protocol):
    """What the pool hands out; `harness.pool` has the real one."""

    @property
    def device(self) -> LeasedDevice:
        """The one device of it."""
        ...

    def report(self, failure: HarnessError) -> None:
        """Evidence against the device."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class DevicePool(Protocol):
    """Where leases come from; `harness.pool` has the real one."""

    def members(self) -> Sequence[MemberStatus]:
        """The devices, as they are now."""
        ...

    def acquire(
        self, requirement: Requirement, *, purpose: str = "", cancelled: Callable[[], bool]
    ) -> Lease:
        """A lease; waits for it until `cancelled`, which is asked several times a second.

        Raises:
            RequirementError: no device could ever do.
            LeaseTimeoutError: it was cancelled.
        """
        ...


class CellRunner(Protocol):
    """Runs one cell on one device."""

    def run(self, cell: Cell, device: LeasedDevice, guard: Guard) -> CellResult:
        """Run it, and leave nothing of it on the device, whatever happens.

        Another thread may cut the cell short by `guard`, also while this waits for the device.

        Raises:
            HarnessError: it failed.
            CellInterrupted: it was cut short.
        """
        ...


class Observer(Protocol):
    """Is told what happens, by the threads in which it happens."""

    def cell_begun(self, cell: Cell, device: str) -> None:
        """A device began with a cell."""
        ...

    def cell_retried(self, cell: Cell, device: str, failure: Failure) -> None:
        """A try failed, and the cell waits for another."""
        ...

    def cell_ended(self, outcome: CellOutcome) -> None:
        """A cell is done, failed or interrupted."""
        ...

    def without_device(self, outcomes: Sequence[CellOutcome]) -> None:
        """Cells have failed, all for the same reason: they will get no device."""
        ...

    def waiting(self, wanted: str, reason: str) -> None:
        """Cells wait for a device, or for another reason than before.

        Args:
            wanted: what they wait for.
            reason: who holds it, or why it is out; empty: it is not waited for any more.
        """
        ...

    def stopping(self) -> None:
        """No cell is begun any more, and those that run are being ended."""
        ...


class Silent:
    """An observer that keeps it to itself."""

    def cell_begun(self, cell: Cell, device: str) -> None:
        """Nothing."""

    def cell_retried(self, cell: Cell, device: str, failure: Failure) -> None:
        """Nothing."""

    def cell_ended(self, outcome: CellOutcome) -> None:
        """Nothing."""

    def without_device(self, outcomes: Sequence[CellOutcome]) -> None:
        """Nothing."""

    def waiting(self, wanted: str, reason: str) -> None:
        """Nothing."""

    def stopping(self) -> None:
        """Nothing."""
