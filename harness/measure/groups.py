"""The verdict over stored runs of one comparison: sessions of A and B that took turns."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import WrongUseError
from harness.measure import comparison
from harness.measure.comparison import Comparison, Verdict
from harness.store.metrics import Direction, Metric, find_metric
from harness.store.records import Run

GATED = ("prefill_tokens_per_s", "decode_tokens_per_s")
"""The metrics that a verdict rests on by default."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison gave.

    Attributes:
        runs: both sides' sessions, in the order in which they ran.
        metrics: each gated metric with what was found.
    """

    group_id: str
    runs: tuple[Run, ...]
    metrics: tuple[tuple[Metric, Comparison], ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the metrics' verdicts; improved only where nothing is uncertain."""
        found = {comparison.verdict for _, comparison in self.metrics}
        order = (Verdict.REGRESSED, Verdict.NOT_ENOUGH_DATA, Verdict.IMPROVED)
        return next((verdict for verdict in order if verdict in found), Verdict.NO_DIFFERENCE)


def check_gated(keys: Sequence[str]) -> tuple[str, ...]:
    """The metrics to judge by, each once.

    Raises:
        UnknownMetricError: there is no such metric.
        WrongUseError: it is neither better high nor better low.
    """
    for key in keys:
        if find_metric(key).direction is Direction.NEITHER:
            raise WrongUseError(f"{key} is neither better high nor better low")
    return tuple(dict.fromkeys(keys))


def judge_runs(
    runs: Sequence[Run],
    *,
    gated: Sequence[str] = GATED,
    threshold: float = comparison.THRESHOLD,
) -> Compared:
    """The verdict over the runs of one group."""
    metrics = [find_metric(key) for key in gated]
    numbers = sorted({run.session for run in runs})
    found = tuple(
        (
            metric,
            comparison.compare(
                [_pair(runs, number, metric.key) for number in numbers],
                higher_is_better=metric.direction is Direction.HIGHER,
                threshold=threshold,
                metrics=len(metrics),
            ),
        )
        for metric in metrics
    )
    group = runs[0].group_id if runs else ""
    return Compared(group, tuple(runs), found)


def _pair(
    runs: Sequence[Run], number: int, key: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    sides = {run.label: run.values(key) for run in runs if run.session == number}
    return sides.get("A", ()), sides.get("B", ())
