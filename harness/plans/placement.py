"""Which devices a cell must keep away from."""

from collections.abc import Collection

from harness.plans.cells import Cell


class Placement:
    """Where cells failed, and where their replicas are. Not for several threads."""

    def __init__(self) -> None:
        self._failed_on: dict[str, set[str]] = {}
        self._replicas_on: dict[str, set[str]] = {}

    def allows(self, cell: Cell, member: str) -> bool:
        """Whether the device may run the cell."""
        return member not in self._failed_on.get(cell.key, ()) and not self._has_replica(
            cell, member
        )

    def is_bound(self, cell: Cell) -> bool:
        """Whether not every device that meets the cell's requirement will do."""
        return bool(cell.spread) or bool(self._failed_on.get(cell.key))

    def given(self, cell: Cell, member: str) -> None:
        """The device runs the cell."""
        if cell.spread:
            self._replicas_on.setdefault(cell.spread, set()).add(member)

    def failed(self, cell: Cell, member: str) -> None:
        """The cell failed there: it is better tried elsewhere."""
        self._failed_on.setdefault(cell.key, set()).add(member)
        if cell.spread:
            self._replicas_on[cell.spread].discard(member)

    def refused(self, cell: Cell, member: str) -> None:
        """The device would never do for the cell, by what the pool knows of it."""
        self._failed_on.setdefault(cell.key, set()).add(member)

    def relax(self, cell: Cell, members: Collection[str]) -> None:
        """Where a cell failed on all devices that there are, it may go onto them again."""
        if members and not any(self.allows(cell, member) for member in members):
            self._failed_on.pop(cell.key, None)

    def is_exhausted(self, cell: Cell, members: Collection[str]) -> bool:
        """Whether each of the devices has another replica of the cell."""
        return bool(members) and all(self._has_replica(cell, member) for member in members)

    def _has_replica(self, cell: Cell, member: str) -> bool:
        return bool(cell.spread) and member in self._replicas_on.get(cell.spread, ())
