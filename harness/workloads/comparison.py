"""A against B on the same phone, in sessions that take turns.

Each pair of sessions runs on one device, one after the other: A B, B A, A B, ... so that what
drifts slowly (heat, charge, background work) favours neither.
"""

from dataclasses import dataclass
from typing import Literal

from buildlib.container.container import GenAIContainer
from harness.errors import WrongUseError
from harness.results.records import Run, new_run_id
from harness.runtimes.files import check_fit
from harness.workloads.bench import Spread
from harness.workloads.session import SessionPlan

Label = Literal["A", "B"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: a container and what it is asked to do."""

    container: GenAIContainer
    plan: SessionPlan


def run_comparison(spread: Spread, a: Side, b: Side, *, sessions: int) -> tuple[Run, ...]:
    """Run both sides in turns; all runs are stored under one group, labelled A and B.

    Args:
        spread: its devices are asked for one device for each pair.

    Raises:
        WrongUseError: no session is asked for.
        RuntimeChoiceError: a container is not for the device.
        HarnessError: a session failed; those before it are in the store.
    """
    if sessions < 1:
        raise WrongUseError(f"sessions must be at least 1, not {sessions}")
    group = new_run_id()
    sides: dict[Label, Side] = {"A": a, "B": b}
    first: dict[Label, Run] = {}
    runs = []
    for number in range(sessions):
        order: tuple[Label, Label] = ("B", "A") if number % 2 else ("A", "B")
        with spread.devices(number) as device:
            properties = device.properties()
            for side in (a, b):
                check_fit(side.container, properties)  # before the other is measured for nothing
            for label in order:
                side = sides[label]
                run = spread.run(
                    device,
                    side.container,
                    side.plan,
                    group_id=group,
                    session=number,
                    label=label,
                    first=first.get(label),
                )
                first.setdefault(label, run)
                runs.append(run)
    return tuple(runs)
