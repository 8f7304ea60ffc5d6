"""Queue of the cells that wait, and estimates of how long they take."""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness.plans.cells import Cell
from harness.pool.requirement import Requirement


class Durations:
    """Estimates of how long cells take, which learn while a plan runs. Not thread-safe.

    A cell takes as long as it did before; else as long as its other sessions, else as the same
    workload on other containers or devices, else as workloads of its kind.

    Args:
        cells: of the plan.
        recorded_s: durations of cells in earlier runs, by their keys.
    """

    def __init__(
        self, cells: Iterable[Cell], recorded_s: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._recorded_s = recorded_s
        self._sums: dict[object, tuple[float, int]] = {}
        """Seconds and number of cells by group."""
        for cell in cells:
            seconds = recorded_s.get(cell.key)
            if seconds is not None:
                self.learn(cell, seconds)

    def learn(self, cell: Cell, seconds: float) -> None:
        """Learn how long a cell took."""
        for group in _groups(cell):
            sum_s, count = self._sums.get(group, (0.0, 0))
            self._sums[group] = sum_s + seconds, count + 1

    def expected_s(self, cell: Cell) -> float:
        """Estimate a cell in seconds; 1 if nothing like it ran yet."""
        seconds = self._recorded_s.get(cell.key)
        if seconds is not None:
            return seconds
        sums = (self._sums[group] for group in _groups(cell) if group in self._sums)
        sum_s, count = next(sums, (1.0, 1))
        return sum_s / count


def _groups(cell: Cell) -> tuple[object, ...]:
    """Return groups of similar cells, the closest first."""
    return cell.group, cell.workload, cell.workload.kind


_URGENT = 0.5
"""A cell longer than this part of each device's share of what is left is urgent."""
_NEWS = 0.05
"""New durations, relative to the waiting cells, that are worth a new order."""


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """Sorts longest first, then in the plan's order."""

    minus_expected_s: float
    number: int
    cell: Cell


class CellQueue:
    """Waiting cells, by greedy list scheduling. Not thread-safe: its owner has a lock.

    A device goes on with the container that it has, so that nothing is pushed needlessly; but near
    the end, once a cell is long for the rest, the longest goes first, so that devices finish
    together.
    """

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
        """Expected seconds of all waiting cells."""
        return max(0.0, self._left_s)

    def requirements(self) -> Sequence[tuple[Requirement, int]]:
        """Return requirements of waiting cells, each with the number of its cells."""
        counts: dict[Requirement, int] = {}
        for (requirement, _), group in self._groups.items():
            counts[requirement] = counts.get(requirement, 0) + len(group)
        return [(requirement, count) for requirement, count in counts.items() if count]

    def waiting(self, requirement: Requirement) -> Iterator[Cell]:
        """Yield cells that wait for a device of this requirement."""
        for (other, _), group in self._groups.items():
            if other == requirement:
                yield from (entry.cell for entry in group)

    def put(self, cell: Cell) -> None:
        """Add a cell that waits again."""
        entry = self._entry(cell)
        bisect.insort(self._group(cell), entry)
        self._left_s -= entry.minus_expected_s
        self._count += 1

    def learn(self, cell: Cell, seconds: float) -> None:
        """Learn how long a cell took, for others like it."""
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
        """Take the next cell for a device; `None` if none fits it.

        Args:
            fits: whether the device is of the required kind.
            allowed: whether it may run this particular cell.
            affinity: of the cell that it ran before.
            devices: number of devices that share the waiting cells.
        """
        heads = [
            entry
            for (requirement, _), group in self._groups.items()
            if group
            and fits(requirement)
            and (entry := next((e for e in group if allowed(e.cell)), None)) is not None
        ]
        if not heads:
            return None
        entry = min(heads)
        share_s = self._left_s / max(1, devices)
        if -entry.minus_expected_s < _URGENT * share_s:
            entry = min((e for e in heads if e.cell.affinity == affinity), default=entry)
        self._remove(entry)
        return entry.cell

    def remove(self, cells: Iterable[Cell]) -> None:
        """Remove cells that will not run."""
        for cell in cells:
            self._remove(next(e for e in self._group(cell) if e.cell.key == cell.key))

    def _remove(self, entry: _Entry) -> None:
        group = self._group(entry.cell)
        del group[bisect.bisect_left(group, entry)]
        self._left_s += entry.minus_expected_s
        self._count -= 1

    def _sort(self, cells: Sequence[Cell]) -> None:
        """Sort all waiting cells by the current estimates."""
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
        number = self._numbers.setdefault(cell.key, len(self._numbers))
        return _Entry(-self._durations.expected_s(cell), number, cell)
