"""Comparison of A with B, from sessions that took turns on the same phone.

Each pair of sessions gives one number, the logarithm of B's mean over A's, so that common
influences (the phone, the hour, the room) fall out. `harness.results.statistics.paired` gives the
interval around their mean.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from harness.errors import WrongUseError
from harness.results.identity import Subject, find_incomparable
from harness.results.metrics import (
    COMPARABLE_METRICS,
    LEADING_METRICS,
    METRICS,
    Metric,
    find_key,
    find_metric,
)
from harness.results.records import SIDES, Comparison, ComparisonRecord, Run
from harness.results.statistics.paired import ERROR_RATE, interval, min_pairs
from harness.results.verdicts import THRESHOLD, Verdict, judge, worst_verdict
from harness.words import pluralize

Pair = tuple[Sequence[float], Sequence[float]]


def compare(
    pairs: Sequence[Pair], *, metric: Metric, threshold: float = THRESHOLD, metrics: int = 1
) -> Comparison:
    """Compare the sessions of A with those of B.

    Args:
        pairs: measured repetitions of A and of B, of sessions that ran one after the other on one
            device; a pair with an empty side does not count.
        threshold: the part of A that B may lose without being a regression.
        metrics: how many metrics are compared together; they share the error rate.

    Raises:
        ValueError: a value is not finite or not above 0.
    """
    whole = [(a, b) for a, b in pairs if a and b]
    if not all(math.isfinite(v) and v > 0 for a, b in whole for v in (*a, *b)):
        raise ValueError("only finite values above 0 can be compared")
    share = ERROR_RATE / metrics
    logs = [math.log(statistics.fmean(b)) - math.log(statistics.fmean(a)) for a, b in whole]
    ratio = math.exp(statistics.fmean(logs)) if logs else None
    needed = min_pairs(metrics)
    if ratio is None or len(logs) < needed:
        reason = f"{pluralize(len(logs), 'pair')} of sessions, and a verdict needs {needed}"
        return Comparison(
            metric=metric.key, ratio=ratio, confidence=1 - 2 * share, pairs=len(logs), reason=reason
        )
    low, high, confidence = interval(logs, share)
    low, high = math.exp(low), math.exp(high)
    verdict, reason = judge(metric, ratio, low, high, threshold, by_chance=False)
    return Comparison(
        metric=metric.key, verdict=verdict, ratio=ratio, low=low, high=high, confidence=confidence,
        pairs=len(logs), reason=reason,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparisonGroup:
    """A against B: their sessions, with the comparison of each metric.

    Attributes:
        runs: both sides' sessions, in the order in which they ran; of both sides at least one.
        threshold: the part of A that B may lose without being a regression.
    """

    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]
    threshold: float = THRESHOLD

    @property
    def group_id(self) -> str:
        """Shared by all runs."""
        return self.runs[0].group_id

    @property
    def a(self) -> Run:
        """The first session of A."""
        return next(run for run in self.runs if run.label == "A")

    @property
    def b(self) -> Run:
        """The first session of B."""
        return next(run for run in self.runs if run.label == "B")

    @property
    def models(self) -> tuple[str, ...]:
        """The models of both sides; one where it is the same."""
        return tuple(dict.fromkeys((self.a.container.model, self.b.container.model)))

    @property
    def workload(self) -> str:
        """The workload of both sides, as `pp64+tg16`."""
        return Subject.of(self.a).label

    @property
    def devices(self) -> tuple[str, ...]:
        """The serials of all devices, each once."""
        return tuple(dict.fromkeys(run.device.serial for run in self.runs))

    @property
    def unchecked(self) -> int:
        """Sessions whose output was not checked."""
        return sum(run.check.outcome != "passed" for run in self.runs)

    @property
    def metrics(self) -> tuple[tuple[Metric, Comparison], ...]:
        """The comparisons with their metrics."""
        return tuple((find_metric(one.metric), one) for one in self.comparisons)

    @property
    def record(self) -> ComparisonRecord:
        """Its terms and verdicts, for the store."""
        return ComparisonRecord(
            group_id=self.group_id,
            metrics=tuple(one.metric for one in self.comparisons),
            threshold=self.threshold,
            verdicts=self.comparisons,
        )

    @property
    def verdict(self) -> Verdict:
        """The worst of the metrics' verdicts; improved only where nothing is uncertain."""
        return worst_verdict(one.verdict for one in self.comparisons)


def check_metrics(keys: Sequence[str]) -> tuple[str, ...]:
    """Validate the metrics to compare, keys or beginnings of them, and return each once."""
    for key in keys:
        if key in METRICS and key not in COMPARABLE_METRICS:
            raise WrongUseError(
                f"{key} is not a speed, latency or cost of the runtime: "
                f"compare {', '.join(COMPARABLE_METRICS)}"
            )
    return tuple(dict.fromkeys(find_key(key, COMPARABLE_METRICS) for key in keys))


def check_pairs(pairs: int, metrics: int) -> None:
    """Refuse a number of session pairs that is too small for a verdict.

    Args:
        metrics: how many are compared together.
    """
    needed = min_pairs(metrics)
    if pairs < needed:
        together = "one metric" if metrics == 1 else f"{metrics} metrics"
        raise WrongUseError(
            f"a verdict over {together} needs at least {needed} pairs of sessions, not {pairs}: "
            "fewer could all agree by chance"
        )


def compare_runs(
    runs: Sequence[Run], *, metrics: Sequence[str] = LEADING_METRICS, threshold: float = THRESHOLD
) -> ComparisonGroup:
    """Compare the two sides of one group.

    Raises:
        WrongUseError: the sides are not comparable; names the keys that differ.
    """
    if len({run.device.emulator for run in runs}) > 1:
        raise WrongUseError("speeds of the emulator and of hardware cannot be compared")
    if differences := _differences(runs):
        raise WrongUseError(f"A and B cannot be compared, they differ in {differences}")
    items = [find_metric(key) for key in metrics]
    comparisons = tuple(_compare_metric(runs, one, threshold, len(items)) for one in items)
    return ComparisonGroup(tuple(runs), comparisons, threshold)


def find_comparisons(
    runs: Sequence[Run], stored: Mapping[str, ComparisonRecord] = MappingProxyType({})
) -> tuple[ComparisonGroup, ...]:
    """Give every comparison among the runs, newest first.

    The verdict is the one that `qnnfarm compare` gave. A comparison that did not end is judged by
    its terms, an old one without any by the default ones.

    Args:
        runs: oldest first, all on hardware or all on the emulator.
        stored: by group, see `ResultsStore.comparisons`.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.label in SIDES:
            groups.setdefault(run.group_id, []).append(run)
    whole = [group for group in groups.values() if {run.label for run in group} == SIDES]
    return tuple(_as_stored(group, stored.get(group[0].group_id)) for group in reversed(whole))


def _differences(runs: Sequence[Run]) -> str:
    """Name the differences that keep the sides from being compared.

    Sessions on several kinds of devices are comparable if each pair shares one.
    """
    differences: dict[str, None] = {}
    for number in sorted({run.session for run in runs}):
        sides = [run for run in runs if run.session == number and run.label in SIDES]
        for one, other in pairwise(sides):
            differences.update(dict.fromkeys(find_incomparable(one, other)))
    return "; ".join(differences)


def _judge_stored(runs: Sequence[Run], metrics: Sequence[str], threshold: float) -> ComparisonGroup:
    """Compare as `compare_runs` does; sides that are not comparable get no verdict."""
    differences = _differences(runs)
    if not differences:
        return compare_runs(runs, metrics=metrics, threshold=threshold)
    reason = f"not comparable, they differ in {differences}"
    nothing = tuple(Comparison(metric=key, reason=reason) for key in metrics)
    return ComparisonGroup(tuple(runs), nothing, threshold)


def _as_stored(runs: Sequence[Run], stored: ComparisonRecord | None) -> ComparisonGroup:
    if stored is None:
        return _judge_stored(runs, LEADING_METRICS, THRESHOLD)
    if not stored.verdicts:
        return _judge_stored(runs, stored.metrics, stored.threshold)
    return ComparisonGroup(tuple(runs), stored.verdicts, stored.threshold)


def _compare_metric(
    runs: Sequence[Run], metric: Metric, threshold: float, metrics: int
) -> Comparison:
    pairs = [_pair(runs, number, metric.key) for number in sorted({run.session for run in runs})]
    whole = [(a, b) for a, b in pairs if a and b]
    if not all(value > 0 for a, b in whole for value in (*a, *b)):  # as bytes that were pushed
        reason = "a value is 0, so there is no ratio"
        return Comparison(metric=metric.key, pairs=len(whole), reason=reason)
    return compare(whole, metric=metric, threshold=threshold, metrics=metrics)


def _pair(
    runs: Sequence[Run], number: int, key: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the values of A and B in one session; empty if they ran on different devices."""
    sides = {run.label: run for run in runs if run.session == number}
    a, b = sides.get("A"), sides.get("B")
    if a is None or b is None or a.device.serial != b.device.serial:
        return (), ()
    return a.values(key), b.values(key)
