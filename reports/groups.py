"""Comparisons of two containers, out of the runs that belong together."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.results.comparison import Comparison, Verdict
from harness.results.groups import Compared, judge_runs
from harness.results.identity import SpeedKey
from harness.results.metrics import Metric
from harness.results.records import Run

SIDES = frozenset({"A", "B"})


@dataclass(frozen=True, slots=True)
class Duel:
    """A against B, in sessions that took turns."""

    a: Run
    b: Run
    compared: Compared
    devices: tuple[str, ...]
    unchecked: int

    @property
    def verdict(self) -> Verdict:
        """The verdict over all judged metrics."""
        return self.compared.verdict

    @property
    def workload(self) -> str:
        """What both were asked to do, as `pp64+tg16`."""
        return SpeedKey.of(self.a).label

    @property
    def models(self) -> tuple[str, ...]:
        """The models of both; one where it is the same."""
        return tuple(dict.fromkeys((self.a.container.model, self.b.container.model)))

    @property
    def metrics(self) -> tuple[tuple[Metric, Comparison], ...]:
        """What was judged."""
        return self.compared.metrics


def duels(runs: Sequence[Run]) -> tuple[Duel, ...]:
    """The comparisons among the runs, newest first; all hardware, or all emulated."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.label in SIDES:
            groups.setdefault(run.group_id, []).append(run)
    found = [_duel(group) for group in groups.values() if {run.label for run in group} == SIDES]
    return tuple(reversed(found))


def _duel(group: Sequence[Run]) -> Duel:
    first = {run.label: run for run in reversed(group)}
    return Duel(
        a=first["A"],
        b=first["B"],
        compared=judge_runs(group),
        devices=tuple(dict.fromkeys(run.device.serial for run in group)),
        unchecked=sum(run.check.outcome != "passed" for run in group),
    )
