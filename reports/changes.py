"""Changes over time: each series now against what it measured before, with one verdict.

The verdict is that of the history and of its alerts, as `qnnfarm alerts` and nightly jobs have it:
a loss is a regression from the night on which it is told from noise until somebody or a recovery
settles it. The present then begins with that change. Elsewhere the present is the last day, and the
past the nights before it, at most `MOST_BEFORE` of them.

Nights differ from each other by far more than repetitions within one, so a night is the unit of the
interval that stands beside the change: the one for a new mean given earlier ones, Student's t over
logarithms (G. J. Hahn and W. Q. Meeker, "Statistical Intervals", 1991, section 4.2). It gives no
verdict but that there is no difference: where a loss above the threshold is outside of it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.results.alerts import UNSETTLED, Alert, find_alert
from harness.results.history import Night, Series
from harness.results.metrics import Direction
from harness.results.statistics.changes import MIN_NIGHTS
from harness.results.statistics.changes import Change as Level
from harness.results.verdicts import Verdict, allowed_loss

MOST_BEFORE = 20
MIN_BEFORE = 3
"""Fewer nights before say nothing about how much nights differ."""
CONFIDENCE = 0.95
SPARK_POINTS = 30
NEWEST = 14
"""Nights in which a settled change of level is news; later it is the past."""


@dataclass(frozen=True, slots=True)
class Change:
    """One series, before and now.

    Attributes:
        ratio: now over before.
        low, high: the interval of the ratio; None with too few nights.
        trend: the newest values, oldest first, for a sparkline.
        since: the first night of the present.
        alert: of the loss with which the present began, or that its gain has settled; else None.
    """

    series: Series
    verdict: Verdict
    before: float
    now: float
    ratio: float
    low: float | None
    high: float | None
    trend: tuple[float, ...]
    since: Night
    alert: Alert | None = None

    @property
    def gain(self) -> float:
        """The change for the better, as a part of the past; below 0 for the worse."""
        return self.series.metric.gain(self.ratio)

    @property
    def status(self) -> str:
        """The verdict, or what became of the loss: `acknowledged`, `expected`, `fixed`."""
        if self.alert is not None and self.alert.state != "open":
            return self.alert.state
        return self.verdict.value

    @property
    def is_regression(self) -> bool:
        """True for a loss that nobody has settled or works on."""
        return self.status == Verdict.REGRESSED

    @property
    def is_suspect(self) -> bool:
        """True where the last night alone is worse than earlier ones explain; one is not enough."""
        if self.verdict is not Verdict.NO_VERDICT or self.low is None or self.high is None:
            return False
        best = max(self.series.metric.gain(self.low), self.series.metric.gain(self.high))
        return best < 0 and -self.gain > allowed_loss(self.series.metric)

    @property
    def note(self) -> str:
        """The alert with its note, or the reason why there is no verdict."""
        if self.alert is not None:
            return ": ".join(filter(None, (f"alert {self.alert.id}", self.alert.note)))
        if self.verdict is not Verdict.NO_VERDICT:
            return ""
        if len(self.series.nights) <= MIN_NIGHTS:
            return f"{len(self.series.nights)} of {MIN_NIGHTS + 2} nights"
        return "one night is not enough" if self.is_suspect else "nights differ too much"


def find_changes(series: Sequence[Series], alerts: Sequence[Alert] = ()) -> tuple[Change, ...]:
    """Compare the present of each series with its past, worst first.

    Args:
        alerts: as `harness.results.alerts.assess` gives them.
    """
    found = (change for one in series for change in [_change(one, alerts)] if change is not None)
    return tuple(sorted(found, key=_order))


def _order(change: Change) -> tuple[int, float]:
    ranks = ("regressed", "acknowledged", "expected", "fixed", "improved")
    rank = ranks.index(change.status) if change.status in ranks else len(ranks)
    return rank, change.gain


def _change(series: Series, alerts: Sequence[Alert]) -> Change | None:
    level, alert = _newest_level(series, alerts)
    nights = series.nights
    start = level.night if level else len(nights) - 1
    past, present = nights[max(start - MOST_BEFORE, 0) : start], nights[start:]
    if not past or not present:
        return None
    before = [math.log(night.mean) for night in past]
    now = [math.log(night.mean) for night in present]
    change = statistics.fmean(now) - statistics.fmean(before)
    half = _half_width(before, len(now))
    low = None if half is None else math.exp(change - half)
    high = None if half is None else math.exp(change + half)
    return Change(
        series,
        _verdict(series, level, low, high),
        math.exp(statistics.fmean(before)),
        math.exp(statistics.fmean(now)),
        math.exp(change),
        low,
        high,
        tuple(night.mean for night in nights[-SPARK_POINTS:]),
        present[0],
        alert,
    )


def _newest_level(series: Series, alerts: Sequence[Alert]) -> tuple[Level | None, Alert | None]:
    """Return the change with which the present begins: an unsettled loss, else the newest one."""
    known = [
        (change, find_alert(series, change, alerts) if change.is_loss else None)
        for change in series.changes
    ]
    unsettled = [one for one in known if one[1] is not None and one[1].state in UNSETTLED]
    if unsettled:
        return unsettled[-1]
    newest = max(len(series.nights) - NEWEST, 1)
    recent = [one for one in known if one[0].night >= newest]
    if not recent:
        return None, None
    level, alert = recent[-1]
    settled = recent[-2][1] if len(recent) > 1 and not level.is_loss else None
    return level, settled if settled is not None and settled.state == "fixed" else alert


def _verdict(series: Series, level: Level | None, low: float | None, high: float | None) -> Verdict:
    if level is not None:
        return Verdict.REGRESSED if level.is_loss else Verdict.IMPROVED
    metric = series.metric
    if low is None or high is None or metric.direction is Direction.NEITHER:
        return Verdict.NO_VERDICT
    worst = min(metric.gain(low), metric.gain(high))
    return Verdict.NO_VERDICT if -worst > allowed_loss(metric) else Verdict.NO_DIFFERENCE


def _half_width(before: Sequence[float], now: int) -> float | None:
    if len(before) < MIN_BEFORE:
        return None
    from scipy.special import stdtrit  # Student's t of `scipy.stats`, which takes a second to load

    spread = statistics.stdev(before) * math.sqrt(1 / now + 1 / len(before))
    return float(stdtrit(len(before) - 1, (1 + CONFIDENCE) / 2)) * spread
