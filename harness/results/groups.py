"""The verdict over stored runs of one comparison: sessions of A and B that took turns."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UnknownMetricError, WrongUseError
from harness.results import comparison
from harness.results.comparison import Comparison, Verdict
from harness.results.metrics import METRICS, Direction, Metric, find_metric
from harness.results.records import Run

GATED = ("prefill_tokens_per_s", "decode_tokens_per_s")
"""The metrics that a verdict rests on by default."""
JUDGED = (*GATED, "ttft_s", "init_s", "peak_rss_bytes")
"""The metrics that it can rest on: speeds, latencies and memory of the runtime."""


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
        WrongUseError: it is none of `JUDGED`.
    """
    for key in keys:
        if key not in METRICS:
            raise UnknownMetricError(key, JUDGED)
        if key not in JUDGED:
            raise WrongUseError(
                f"{key} is neither a speed nor a latency nor memory of the runtime: "
                f"judge by {', '.join(JUDGED)}"
            )
    return tuple(dict.fromkeys(keys))


def check_pairs(pairs: int, metrics: int) -> None:
    """Refuse a number of pairs of sessions from which no verdict could come.

    Args:
        metrics: how many are judged together.

    Raises:
        WrongUseError: says how many it takes, and why.
    """
    needed = comparison.pairs_needed(metrics)
    if pairs < needed:
        together = "one metric" if metrics == 1 else f"{metrics} metrics"
        raise WrongUseError(
            f"a verdict over {together} takes {needed} pairs of sessions at least, not {pairs}: "
            "fewer could all agree by chance"
        )


def judge_runs(
    runs: Sequence[Run],
    *,
    gated: Sequence[str] = GATED,
    threshold: float = comparison.THRESHOLD,
) -> Compared:
    """The verdict over the runs of one group.

    Raises:
        WrongUseError: some ran on the emulator, and some on hardware.
    """
    if len({run.device.emulator for run in runs}) > 1:
        raise WrongUseError("speeds of the emulator and of hardware cannot be compared")
    metrics = [find_metric(key) for key in gated]
    found = tuple((metric, _judge(runs, metric, threshold, len(metrics))) for metric in metrics)
    group = runs[0].group_id if runs else ""
    return Compared(group, tuple(runs), found)


def _judge(runs: Sequence[Run], metric: Metric, threshold: float, metrics: int) -> Comparison:
    pairs = [_pair(runs, number, metric.key) for number in sorted({run.session for run in runs})]
    whole = [(a, b) for a, b in pairs if a and b]
    if not all(value > 0 for a, b in whole for value in (*a, *b)):  # as bytes that were pushed
        reason = "a value is 0, which is in no ratio to another"
        return Comparison(Verdict.NOT_ENOUGH_DATA, None, None, None, 0.0, len(whole), reason)
    return comparison.compare(
        whole,
        higher_is_better=metric.direction is Direction.HIGHER,
        threshold=threshold,
        metrics=metrics,
    )


def _pair(
    runs: Sequence[Run], number: int, key: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What A and B gave in one session; nothing of a side that ran on another device."""
    sides = {run.label: run for run in runs if run.session == number}
    a, b = sides.get("A"), sides.get("B")
    if a is None or b is None or a.device.serial != b.device.serial:
        return (), ()
    return a.values(key), b.values(key)
