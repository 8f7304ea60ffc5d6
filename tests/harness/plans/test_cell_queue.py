"""In which order cells go onto devices, and how long that takes: by simulation, without clocks."""

import heapq
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plans.cell_queue import CellQueue, expectations
from harness.plans.cells import Cell
from harness.pool.base import Requirement
from tests.harness.plans.farm import cells


class Simulation:
    """Devices that take cells and are busy for as long as those last."""

    def __init__(self, todo: Sequence[Cell], seconds: dict[str, float]) -> None:
        self.queue = CellQueue(todo, lambda cell: seconds[cell.key])
        self.seconds = seconds
        self.switches = 0
        self.order: list[Cell] = []

    def run(self, devices: int) -> float:
        """The makespan."""
        free = [(0.0, number, "") for number in range(devices)]
        end = 0.0
        while free:
            at, number, affinity = heapq.heappop(free)
            cell = self.queue.take(
                lambda _: True, lambda _: True, affinity=affinity, devices=len(free) + 1
            )
            if cell is None:
                continue
            self.order.append(cell)
            self.switches += affinity not in {"", cell.affinity}
            done = at + self.seconds[cell.key]
            end = max(end, done)
            heapq.heappush(free, (done, number, cell.affinity))
        return end


def work(
    containers: int, each: int, low: float, high: float
) -> tuple[list[Cell], dict[str, float]]:
    chance = random.Random(7)  # noqa: S311 - a simulation
    todo = [
        cell
        for number in range(containers)
        for cell in cells(each, container=f"container-{number}")
    ]
    return todo, {cell.key: chance.uniform(low, high) for cell in todo}


def bound(seconds: dict[str, float], devices: int) -> float:
    return max(sum(seconds.values()) / devices, *seconds.values())


@pytest.mark.parametrize(("containers", "low", "high"), [(1, 1, 1), (1, 0.1, 8), (4, 0.5, 5)])
def test_200_devices_finish_5000_cells_together(containers: int, low: float, high: float) -> None:
    todo, seconds = work(containers, 5000 // containers, low, high)
    makespan = Simulation(todo, seconds).run(200)
    assert makespan <= 1.05 * bound(seconds, 200)


def test_one_long_cell_among_short_ones_does_not_come_last() -> None:
    todo, seconds = work(2, 500, 1, 1)
    seconds[todo[777].key] = 60.0
    makespan = Simulation(todo, seconds).run(10)
    assert makespan <= 1.05 * bound(seconds, 10)


def test_a_device_goes_on_with_the_container_that_it_has() -> None:
    todo, seconds = work(4, 250, 0.5, 2)
    simulation = Simulation(todo, seconds)
    simulation.run(8)
    assert simulation.switches <= 2 * 8


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.lists(st.floats(0.01, 100), min_size=1, max_size=60),
    devices=st.integers(1, 12),
    containers=st.integers(1, 5),
)
def test_it_never_exceeds_what_list_scheduling_promises(
    seconds: list[float], devices: int, containers: int
) -> None:
    todo = [cells(1, container=f"c{n % containers}", first=n)[0] for n in range(len(seconds))]
    lasts = {cell.key: s for cell, s in zip(todo, seconds, strict=True)}
    simulation = Simulation(todo, lasts)
    makespan = simulation.run(devices)
    assert sorted(c.key for c in simulation.order) == sorted(lasts)
    assert makespan <= (sum(seconds) + (devices - 1) * max(seconds)) / devices + 1e-6  # Graham 1966
    assert len(simulation.queue) == 0
    assert simulation.queue.left_s == pytest.approx(0, abs=1e-6)


def test_only_what_fits_and_is_allowed_is_taken() -> None:
    phone, board = Requirement(soc="SM8750"), Requirement(soc="QCS8550")
    todo = cells(2, phone) + cells(1, board, first=2)
    queue = CellQueue(todo, lambda _: 1.0)
    assert dict(queue.requirements()) == {phone: 2, board: 1}

    def take(wanted: Requirement, not_this: Cell | None = None) -> Cell | None:
        return queue.take(
            lambda r: r == wanted, lambda cell: cell != not_this, affinity="", devices=1
        )

    assert take(phone, not_this=todo[0]) == todo[1]
    assert take(phone, not_this=todo[0]) is None
    assert take(board) == todo[2]
    queue.put(todo[2])
    assert list(queue.waiting(board)) == [todo[2]]
    queue.remove([todo[2], todo[0]])
    assert len(queue) == 0
    assert list(queue.requirements()) == []


def test_the_longest_goes_first_by_what_earlier_ones_took() -> None:
    todo = cells(4)
    known = {todo[1].key: 5.0, todo[2].key: 9.0}
    expected_s = expectations(todo, lambda cell: known.get(cell.key))
    assert [expected_s(cell) for cell in todo] == [7.0, 5.0, 9.0, 7.0]
    queue = CellQueue(todo, expected_s)
    taken = [
        queue.take(lambda _: True, lambda _: True, affinity="", devices=4) for _ in range(len(todo))
    ]
    assert taken == [todo[2], todo[0], todo[3], todo[1]]
