"""Changes since a baseline: each series and metric now, against what it measured before.

Where `harness.results.changes` found a change of level among the newest points, the present begins
with that change, which has its verdict. Elsewhere the present is the last day, and the past the
points before it, at most `MOST_BEFORE` of them. Points differ between nights by far more than
repetitions within one, so a point is the unit, and the interval is the one for a new mean given
earlier ones: Student's t over the logarithms of the points (G. J. Hahn and W. Q. Meeker,
"Statistical Intervals", 1991, section 4.2). With too few points for the detection, a change is real
where the interval is all on one side of no change, and the change is larger than the threshold.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.results.comparison import THRESHOLD, Verdict
from harness.results.metrics import Direction, Metric, find_metric
from reports.history import Point, Series

if TYPE_CHECKING:
    from harness.results.changes import Change as Level

MOST_BEFORE = 20
MIN_BEFORE = 3
"""Fewer points before say nothing about how much nights differ."""
CONFIDENCE = 0.95
SPARK_POINTS = 30
NEWEST = 14
"""Points in which a change of level is news; later it is the past."""


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of one series, before and now.

    Attributes:
        ratio: now over before.
        low, high: the interval of the ratio; None with too few points.
        trend: the newest values, oldest first, for a sparkline.
        since: the first point of the present.
    """

    series: Series
    metric: Metric
    verdict: Verdict
    before: float
    now: float
    ratio: float
    low: float | None
    high: float | None
    trend: tuple[float, ...]
    since: Point

    @property
    def gain(self) -> float:
        """The change for the better, as a part of the past; below 0 for the worse."""
        return self.ratio - 1 if self.metric.direction is Direction.HIGHER else 1 - self.ratio


def find_changes(series: Sequence[Series], *, threshold: float = THRESHOLD) -> tuple[Change, ...]:
    """Compare the present of each series with its past, worst first."""
    found = [
        change
        for one in series
        for key in one.metrics
        for change in [_change(one, find_metric(key), threshold)]
        if change is not None
    ]
    ranks = (Verdict.REGRESSED, Verdict.IMPROVED)
    return tuple(
        sorted(
            found,
            key=lambda one: (
                ranks.index(one.verdict) if one.verdict in ranks else len(ranks),
                one.gain,
            ),
        )
    )


def _change(series: Series, metric: Metric, threshold: float) -> Change | None:
    level = _newest_level(series, metric.key)
    start = len(series.past) if level is None else level.night
    present = [p for p in series.points[start:] if metric.key in p.values]
    past = [p for p in series.points[:start] if metric.key in p.values][-MOST_BEFORE:]
    values = [p.values[metric.key] for p in (*past, *present)]
    if not present or not past or min(values) <= 0:
        return None
    before = [math.log(value) for value in values[: len(past)]]
    now = [math.log(value) for value in values[len(past) :]]
    change = statistics.fmean(now) - statistics.fmean(before)
    half = _half_width(before, len(now))
    low = None if half is None else math.exp(change - half)
    high = None if half is None else math.exp(change + half)
    return Change(
        series,
        metric,
        _judge(metric, math.exp(change), low, high, threshold)
        if level is None
        else (Verdict.REGRESSED if level.is_loss else Verdict.IMPROVED),
        math.exp(statistics.fmean(before)),
        math.exp(statistics.fmean(now)),
        math.exp(change),
        low,
        high,
        tuple(
            p.values[metric.key] for p in series.points[-SPARK_POINTS:] if metric.key in p.values
        ),
        present[0],
    )


def _newest_level(series: Series, key: str) -> "Level | None":
    """The last change of level, if it is among the newest points."""
    levels = series.changes.get(key, ())
    newest = len(series.points) - NEWEST
    return levels[-1] if levels and levels[-1].night >= max(newest, 1) else None


def _half_width(before: Sequence[float], now: int) -> float | None:
    if len(before) < MIN_BEFORE:
        return None
    from scipy import stats

    spread = statistics.stdev(before) * math.sqrt(1 / now + 1 / len(before))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(before) - 1)) * spread


def _judge(
    metric: Metric, ratio: float, low: float | None, high: float | None, threshold: float
) -> Verdict:
    if low is None or high is None or metric.direction is Direction.NEITHER:
        return Verdict.NOT_ENOUGH_DATA
    gains = sorted(
        (bound - 1) * (1 if metric.direction is Direction.HIGHER else -1) for bound in (low, high)
    )
    gain = (ratio - 1) * (1 if metric.direction is Direction.HIGHER else -1)
    if gains[1] < 0 and -gain > threshold:
        return Verdict.REGRESSED
    if gains[0] > 0 and gain > threshold:
        return Verdict.IMPROVED
    return Verdict.NO_DIFFERENCE if -gains[0] <= threshold else Verdict.NOT_ENOUGH_DATA
