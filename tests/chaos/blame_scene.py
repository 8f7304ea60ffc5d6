"""Users of a shared pool beside a script that hangs, or on a pool with a hostile device."""

import contextlib
import sqlite3
import time

from harness.errors import HarnessError, LeaseLostError, RuntimeOutputError
from harness.plans.cells import Cell, make_cell
from harness.pool.failure_policy import Work
from harness.pool.lease import Lease
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.workloads.command import Command
from tests.chaos import run_scene
from tests.chaos.actors import Actor, Tell
from tests.chaos.drawing import TOKEN, Case
from tests.chaos.ends import End, end_of
from tests.chaos.lab import Farm, Lab, patient

_ACQUIRE_S = 45.0
_COMMAND_S = 3.0
_HUNG_S = 1.5
_ROUNDS = 4
_TRIES = 12
_LIMIT = 3
_OUT = {"distrusted", "gave up"}


def begin(lab: Lab, farm: Farm, case: Case) -> list[Actor]:
    """Neighbours, who want any device; in the scene `hang` first one whose script hangs."""
    hangs = case.scene == "hang"
    first = [_hanging_user(lab, farm, case)] if hangs else []
    return first + [_neighbour(lab, farm, case, number) for number in range(case.actors - hangs)]


def _hanging_user(lab: Lab, farm: Farm, case: Case) -> Actor:
    work = Command(command=("sh", "-c", "sleep 600", TOKEN))
    cells: list[Cell] = [
        make_cell(
            f"{case.name}/hangs#{number}",
            work,
            Requirement(),
            session=number,
            timeout_s=patient(_HUNG_S),
        )
        for number in range(3)
    ]
    return run_scene.runner(lab, farm, case, cells, "hanging user")


def _neighbour(lab: Lab, farm: Farm, case: Case, number: int) -> Actor:
    def part(tell: Tell) -> None:
        tell({"since": time.time()})
        with Pool.open(farm.pool_file) as pool:
            for turn in range(_ROUNDS):
                _take_a_turn(pool, case, f"{case.name}-{number}-{turn}", tell)

    return Actor(f"neighbour {number}", part, lab.folder / f"{case.name}-{number}.log")


def _take_a_turn(pool: Pool, case: Case, word: str, tell: Tell) -> None:
    """Have a word said by some device, and another by whichever is next where it is not.

    Each is work of its own: the same work that fails again on a device says nothing new of it.
    """
    for number in range(_TRIES):
        with pool.acquire(Requirement(), timeout_s=patient(_ACQUIRE_S), purpose=case.name) as lease:
            said = f"{word}-{number}"
            work = Work(said, f"word {said}", time.time())
            try:
                _say(lease, said)
            except HarnessError as error:
                tell({"try": [type(error).__name__, str(error)]})
                with contextlib.suppress(LeaseLostError):
                    lease.report(error, work)
            else:
                lease.report_success(work)
                return
    tell({"complaint": f"no device said {word}"})


def _say(lease: Lease, word: str) -> None:
    device = lease.device
    said = device.shell(["echo", TOKEN, word], timeout_s=patient(_COMMAND_S)).stdout
    if said != f"{TOKEN} {word}\n":
        raise RuntimeOutputError(device.serial, f"it answered {said[:60]!r} to an echo")


def judge(
    lab: Lab, farm: Farm, case: Case, actors: list[Actor], struck: set[str]
) -> tuple[list[End], list[str]]:
    """Neighbours get their words; healthy devices stay in, and a hostile one does not."""
    ends = [end_of(actor) for actor in actors]
    for actor in actors:
        ends += [
            End(f"{actor.name}, a try", "error", *line["try"])
            for line in actor.told
            if "try" in line
        ]
    ends += [end for actor in actors for end in run_scene.ends_of_cells(actor, "")]
    complaints = [
        line["complaint"] for actor in actors for line in actor.told if "complaint" in line
    ]
    since = min(line["since"] for actor in actors for line in actor.told if "since" in line)
    hostile = farm.member(0) if case.scene == "hostile" else ""
    told = _history(lab, since)
    complaints += [
        f"{name} was put out: {text}"
        for name, what, text in told
        if what == "distrusted" and name != hostile
    ]
    if hostile:
        of_it = [what for name, what, _ in told if name == hostile]
        counted = sum(what.startswith("counted: ") for what in of_it)
        garbage = sum(end.error == "RuntimeOutputError" for end in ends)
        if counted < min(garbage, _LIMIT):
            complaints.append(f"{garbage} wrong answers of {hostile} count {counted} times")
        if counted >= _LIMIT and not _OUT & set(of_it):
            complaints.append(f"{hostile} stayed in: {of_it}")
    else:
        tries = [len(line["failures"]) for line in actors[0].told if "cell" in line]
        if struck == {"hang"} and any(count > 2 for count in tries):
            complaints.append(f"what hangs was tried {tries} times")
    return ends, complaints


def _history(lab: Lab, since: float) -> list[tuple[str, str, str]]:
    """Device, kind and text of each event."""
    with contextlib.closing(sqlite3.connect(f"file:{lab.ledger}?mode=ro", uri=True)) as db:
        return db.execute(
            "SELECT name, what, text FROM pool_history JOIN pool_devices USING (key) WHERE at >= ?"
            " ORDER BY id",
            (since,),
        ).fetchall()
