"""Queue of the cells that wait, and estimates of how long they take."""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.plans.cells import Cell
from harness.pool.requirement import Requirement


@dataclass(slots=True)
class _Mean:
    sum_s: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.sum_s += seconds
        self.count += 1


class Durations:
    """What is expected of cells; learns while a plan runs. Not for several threads.

    A cell takes as long as it did before; else as long as the other sessions of it, else as the
    same work on other containers or devices, else as work of its kind.

    Args:
        cells: of the plan.
        known_s: how long a cell took in an earlier run; `None`: it is not known.
    """

    def __init__(
        self, cells: Iterable[Cell], known_s: Callable[[Cell], float | None] = lambda _: None
    ) -> None:
        self._known_s = known_s
        self._means: dict[object, _Mean] = {}
        for cell in cells:
            seconds = known_s(cell)
            if seconds is not None:
                self.learn(cell, seconds)

    def learn(self, cell: Cell, seconds: float) -> None:
        """A cell took so long."""
        for likeness in _likenesses(cell):
            self._means.setdefault(likeness, _Mean()).add(seconds)

    def expected_s(self, cell: Cell) -> float:
        """Seconds; 1 where nothing like it is known."""
        known = self._known_s(cell)
        if known is not None:
            return known
        for likeness in _likenesses(cell):
            mean = self._means.get(likeness)
            if mean is not None:
                return mean.sum_s / mean.count
        return 1.0


def _likenesses(cell: Cell) -> tuple[object, ...]:
    """What it has in common with others, closest first."""
    return cell.group, cell.workload, cell.workload.kind


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
