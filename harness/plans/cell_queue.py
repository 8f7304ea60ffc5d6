"""Which cell a free device takes next.

Greedy list scheduling. A device goes on with the container that it has, so that nothing is pushed
for nothing; but near the end, as soon as a cell is long for what is left, the longest goes first,
so that the devices finish together.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.plans.cells import Cell
from harness.plans.durations import Durations
from harness.pool.requirement import Requirement

_URGENT = 0.5
"""Part of what is left for each device, from which on a cell is long."""
_NEWS = 0.05
"""Durations that are worth a new order, in parts of what waits."""


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """Sorts longest first, then in the plan's order."""

    minus_expected_s: float
    number: int
    cell: Cell


class CellQueue:
    """The cells that wait. Not for several threads: its owner has a lock."""

    def __init__(self, cells: Sequence[Cell], durations: Durations) -> None:
        self._numbers = {cell.key: number for number, cell in enumerate(cells)}
        self._durations = durations
        self._groups: dict[tuple[Requirement, str], list[_Entry]] = {}
        self._left_s = 0.0
        self._count = 0
        self._learned = 0
        self._sort(cells)

    def __len__(self) -> int:
        return self._count

    @property
    def left_s(self) -> float:
        """Expected seconds of all that waits."""
        return max(0.0, self._left_s)

    def requirements(self) -> Sequence[tuple[Requirement, int]]:
        """What waits, by what it requires of a device; each with the number of its cells."""
        counts: dict[Requirement, int] = {}
        for (requirement, _), group in self._groups.items():
            counts[requirement] = counts.get(requirement, 0) + len(group)
        return [(requirement, count) for requirement, count in counts.items() if count]

    def waiting(self, requirement: Requirement) -> Iterator[Cell]:
        """The cells that wait for such a device."""
        for (wanted, _), group in self._groups.items():
            if wanted == requirement:
                yield from (entry.cell for entry in group)

    def put(self, cell: Cell) -> None:
        """A cell that waits again."""
        entry = self._entry(cell)
        bisect.insort(self._group(cell), entry)
        self._left_s -= entry.minus_expected_s
        self._count += 1

    def learn(self, cell: Cell, seconds: float) -> None:
        """A cell took so long, and others like it will."""
        self._durations.learn(cell, seconds)
        self._learned += 1
        if self._learned > _NEWS * self._count:
            self._sort([entry.cell for group in self._groups.values() for entry in group])

    def take(
        self,
        fits: Callable[[Requirement], bool],
        allowed: Callable[[Cell], bool],
        *,
        affinity: str,
        devices: int,
    ) -> Cell | None:
        """The next cell for a device, which no longer waits then; `None` if none is for it.

        Args:
            fits: whether the device is of the kind that is required.
            allowed: whether it may run this very cell.
            affinity: of the cell that it ran before.
            devices: how many share what waits.
        """
        heads = [
            entry
            for (requirement, _), group in self._groups.items()
            if group and fits(requirement)
            for entry in _first(group, allowed)
        ]
        if not heads:
            return None
        chosen = min(heads)
        share_s = self._left_s / max(1, devices)
        if -chosen.minus_expected_s < _URGENT * share_s:
            chosen = min((e for e in heads if e.cell.affinity == affinity), default=chosen)
        self._remove(chosen)
        return chosen.cell

    def remove(self, cells: Iterable[Cell]) -> None:
        """Cells that wait for nothing any more."""
        for cell in cells:
            self._remove(next(e for e in self._group(cell) if e.cell.key == cell.key))

    def _remove(self, entry: _Entry) -> None:
        group = self._group(entry.cell)
        del group[bisect.bisect_left(group, entry)]
        self._left_s += entry.minus_expected_s
        self._count -= 1

    def _sort(self, cells: Sequence[Cell]) -> None:
        """Put all that waits into order anew, by what is expected now."""
        self._groups.clear()
        for cell in cells:
            self._group(cell).append(self._entry(cell))
        for group in self._groups.values():
            group.sort()
        self._left_s = -sum(e.minus_expected_s for group in self._groups.values() for e in group)
        self._count = len(cells)
        self._learned = 0

    def _group(self, cell: Cell) -> list[_Entry]:
        return self._groups.setdefault((cell.requirement, cell.affinity), [])

    def _entry(self, cell: Cell) -> _Entry:
        return _Entry(-self._durations.expected_s(cell), self._numbers[cell.key], cell)


def _first(group: Sequence[_Entry], allowed: Callable[[Cell], bool]) -> Iterator[_Entry]:
    for entry in group:
        if allowed(entry.cell):
            yield entry
            return
