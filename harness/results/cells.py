"""The grade of stored runs that are sessions of one cell."""

from collections.abc import Sequence

from harness.results.records import Run
from harness.results.stability import Stability, grade

GATE, THROTTLING = "thermal_gate", "throttling"
"""Names of the conditions that bear on a grade: what was waited for, and what was seen then."""


def grade_runs(runs: Sequence[Run], metric: str) -> Stability:
    """The grade of one metric over runs that are sessions of one cell."""
    measured = [run for run in runs if run.values(metric)]
    return grade(
        [run.values(metric) for run in measured],
        throttled=sum(was_throttled(run) for run in measured),
        ungated=sum(not was_gated(run) for run in measured),
        unsettled=sum(run.warmup_detected is False for run in measured),
    )


def was_gated(run: Run) -> bool:
    """Whether the device was seen to be cool enough before the run."""
    return any(c.get("name") == GATE and c.get("outcome") == "met" for c in run.conditions)


def was_throttled(run: Run) -> bool:
    """Whether clocks were seen to fall during the run."""
    return any(c.get("name") == THROTTLING and c.get("outcome") == "seen" for c in run.conditions)
