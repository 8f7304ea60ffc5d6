"""In which order cells go onto devices, and how long that takes: by simulation, without clocks."""

import heapq
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plans.cell_queue import CellQueue, Durations
from harness.plans.cells import Cell, make_cell
from harness.pool.requirement import Requirement
from harness.workloads.command import Command
from tests.harness.plans.farm import cells


class Simulation:
    """Devices that take cells and are busy for as long as those last."""

    def __init__(
        self, todo: Sequence[Cell], seconds: dict[str, float], *, known: bool = True
    ) -> None:
        durations = Durations(todo, seconds if known else {})
        self.queue = CellQueue(todo, durations)
        self.seconds = seconds
        self.switches = 0
        self.order: list[Cell] = []

    def run(self, devices: int) -> float:
        """The makespan."""
        free: list[tuple[float, int, str, Cell | None]]
        free = [(0.0, number, "", None) for number in range(devices)]
        end = 0.0
        while free:
            at, number, affinity, before = heapq.heappop(free)
            if before is not None:
                self.queue.learn(before, self.seconds[before.key])
            cell = self.queue.take(
                lambda _: True, lambda _: True, affinity=affinity, devices=len(free) + 1
            )
            if cell is None:
                continue
            self.order.append(cell)
            self.switches += affinity not in {"", cell.affinity}
            done = at + self.seconds[cell.key]
            end = max(end, done)
            heapq.heappush(free, (done, number, cell.affinity, cell))
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
def test_100_devices_finish_2500_cells_together(containers: int, low: float, high: float) -> None:
    todo, seconds = work(containers, 2500 // containers, low, high)
    makespan = Simulation(todo, seconds).run(100)
    assert makespan <= 1.05 * bound(seconds, 100)


@pytest.mark.parametrize(("containers", "works", "sessions"), [(5, 5, 100), (50, 50, 1)])
def test_they_do_so_too_where_nothing_is_known_at_first(
    containers: int, works: int, sessions: int
) -> None:
    chance = random.Random(1)  # noqa: S311 - a simulation
    speed = [chance.uniform(0.5, 2) for _ in range(containers)]
    length = [chance.uniform(1, 8) for _ in range(works)]
    seconds: dict[str, float] = {}
    todo = []
    for work, container, session in itertools.product(
        range(works), range(containers), range(sessions)
    ):
        cell = make_cell(
            f"{container}/{work}#{session}",
            Command(command=("run", str(work))),
            Requirement(),
            container_sha256=str(container),
            session=session,
        )
        todo.append(cell)
        seconds[cell.key] = speed[container] * length[work] * chance.uniform(0.8, 1.2)
    makespan = Simulation(todo, seconds, known=False).run(100)
    assert makespan <= 1.03 * bound(seconds, 100)


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
    queue = CellQueue(todo, Durations(todo))
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
    durations = Durations(todo, known)
    assert [durations.expected_s(cell) for cell in todo] == [7.0, 5.0, 9.0, 7.0]
    queue = CellQueue(todo, durations)
    taken = [
        queue.take(lambda _: True, lambda _: True, affinity="", devices=4) for _ in range(len(todo))
    ]
    assert taken == [todo[2], todo[0], todo[3], todo[1]]


def test_the_closest_that_is_known_is_expected() -> None:
    def cell(work: str, container: str = "c", session: int = 0) -> Cell:
        command = Command(command=(work,))
        return make_cell(
            "label", command, Requirement(), container_sha256=container, session=session
        )

    durations = Durations([])
    assert durations.expected_s(cell("a")) == 1.0
    durations.learn(cell("a"), 10.0)
    durations.learn(cell("b", "d"), 30.0)
    assert durations.expected_s(cell("a", session=1)) == 10.0
    assert durations.expected_s(cell("b")) == 30.0
    assert durations.expected_s(cell("c")) == 20.0


def test_learned_durations_reorder_waiting_cells() -> None:
    todo = cells(6)
    queue = CellQueue(todo, Durations(todo))

    def take() -> Cell | None:
        return queue.take(lambda _: True, lambda _: True, affinity="", devices=1)

    assert take() == todo[0]
    again = todo[4]
    queue.remove([again])
    queue.learn(again, 50.0)
    assert queue.left_s == 4 * 50.0
    queue.learn(todo[0], 10.0)
    queue.put(again)
    assert take() == again
    assert [take() for _ in range(5)] == [todo[1], todo[2], todo[3], todo[5], None]
