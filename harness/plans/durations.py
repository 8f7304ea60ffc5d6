"""How long cells take, by what is known of them and of others like them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.plans.cells import Cell


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
