"""Changes over time: the losses of each series that are open, and its last night, in words.

Sizes, dates and verdicts are those of the histories (`harness.results.history`) and their alerts,
as `qnnfarm history`, `qnnfarm alerts` and nightly jobs have them: a loss is a regression from the
night on which it is told from noise until somebody or a recovery settles it. A series without an
unsettled loss has its newest change, if that is of the last `NEWEST` nights, else its last night
against at most `MOST_BEFORE` nights before it.

Nights differ from each other by far more than repetitions within one, so a night is the unit of the
interval that stands beside the change (`half_width`). It gives no verdict but that there is no
difference; a last night outside of it is a suspect, since one night is not enough.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.results.alerts import UNSETTLED, Alert, by_series
from harness.results.history import MeasuredNight, Series, night_logs
from harness.results.metrics import Direction, Use
from harness.results.statistics.changes import MIN_NIGHTS
from harness.results.statistics.changes import Change as Level
from harness.results.statistics.medians import half_width
from harness.results.verdicts import Verdict, allowed_loss, judge

MOST_BEFORE = 20
SPARK_POINTS = 30
_SOON = "one night is not enough, the next one will tell"
NEWEST = 14
"""Nights in which a settled change of level is news; later it is the past."""


@dataclass(frozen=True, slots=True)
class ShownChange:
    """One series, before and since a change of its level, or before and in its last night.

    Attributes:
        ratio: now over before.
        low, high: the interval of the ratio; None with too few nights.
        trend: the newest values, oldest first, for a sparkline.
        since: the first night of the present.
        alert: of the loss with which the present began, or that its gain has settled; else None.
        scope: the devices that changed, where others did not: `P3 alone`.
    """

    series: Series
    verdict: Verdict
    before: float
    now: float
    ratio: float
    low: float | None
    high: float | None
    trend: tuple[float, ...]
    since: MeasuredNight
    alert: Alert | None = None
    scope: str = ""

    @property
    def gain(self) -> float:
        """The change for the better, as a part of the past; below 0 for the worse."""
        return self.series.metric.gain(self.ratio)

    @property
    def status(self) -> str:
        """The verdict, or the state of the loss: `acknowledged`, `expected`, `fixed`."""
        if self.alert is not None and self.alert.state != "open":
            return self.alert.state
        return self.verdict.value

    @property
    def is_telling(self) -> bool:
        """True for a change of level, and for a last night that differs."""
        return self._is_apart or self.status not in {Verdict.NO_DIFFERENCE, Verdict.NO_VERDICT}

    @property
    def is_suspect(self) -> bool:
        """True where the last night alone is worse than earlier ones explain; one is not enough."""
        return self.gain < 0 and self._is_apart

    @property
    def _is_apart(self) -> bool:
        """True where the last night differs by more than the nights before it do."""
        low, high = self.bounds
        if self.verdict is not Verdict.NO_VERDICT or low is None or high is None:
            return False
        return (low > 1 or high < 1) and abs(self.gain) > allowed_loss(self.series.metric)

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The interval that a verdict goes by; a perplexity has no noise, so none around it."""
        is_exact = Use.EXACT in self.series.metric.use
        return (self.ratio, self.ratio) if is_exact else (self.low, self.high)

    @property
    def note(self) -> str:
        """The devices of a change of some, and the alert with its note; or why no verdict is."""
        if self.alert is not None:
            alert = ": ".join(filter(None, (f"alert {self.alert.id}", self.alert.note)))
            return "; ".join(filter(None, (self.scope, alert)))
        if self.scope:
            return self.scope
        if self.verdict is not Verdict.NO_VERDICT:
            return ""
        if len(self.series.nights) <= MIN_NIGHTS:
            return f"{len(self.series.nights)} nights, and a verdict needs {MIN_NIGHTS + 2}"
        if self._is_apart:
            return _SOON
        return "nights differ too much"


def find_changes(series: Sequence[Series], alerts: Sequence[Alert] = ()) -> tuple[ShownChange, ...]:
    """Find the changes of histories, worst first.

    Args:
        alerts: as `harness.results.alerts.assess` gives them.
    """
    of_series = by_series(alerts)
    all_changes = (change for one in series for change in _changes(one, of_series.get(one.id, ())))
    return tuple(sorted(all_changes, key=_order))


def _order(change: ShownChange) -> tuple[int, float]:
    ranks = ("regressed", "acknowledged", "expected", "fixed", "improved")
    rank = ranks.index(change.status) if change.status in ranks else len(ranks)
    return rank, change.gain


def _changes(series: Series, alerts: Sequence[Alert]) -> Iterator[ShownChange]:
    alert_of = {alert.change: alert for alert in alerts}
    unsettled = [
        change
        for change in series.changes
        if change in alert_of and alert_of[change].state in UNSETTLED
    ]
    newest = series.changes[-1:] if not unsettled else ()
    recent = [one for one in newest if one.night >= max(len(series.nights) - NEWEST, 1)]
    for level in (*unsettled, *recent):
        yield _of_level(series, level, alert_of.get(level) or _settled_by(series, level, alert_of))
    last = _of_last_night(series)
    if last is not None and (last.is_suspect or not (unsettled or recent)):
        yield last


def _settled_by(series: Series, gain: Level, matched: Mapping[Level | None, Alert]) -> Alert | None:
    """Return the alert of the loss before a gain, if that has fixed it."""
    before = [one for one in series.changes if one.night < gain.night][-1:]
    alert = next((matched[one] for one in before if one in matched), None)
    return alert if alert is not None and alert.state == "fixed" and not gain.is_loss else None


def _of_level(series: Series, level: Level, alert: Alert | None) -> ShownChange:
    past, present = series.levels_beside(level)
    verdict = Verdict.REGRESSED if level.is_loss else Verdict.IMPROVED
    return replace(_compare(series, past, present, verdict, level.ratio, alert), scope=level.scope)


def _of_last_night(series: Series) -> ShownChange | None:
    """Compare the last night with those before it at the same level."""
    last = len(series.nights) - 1
    starts = (*(one.night for one in series.changes if one.night < last), *series.swaps)
    first = max(starts, default=0)
    past, present = series.nights[max(first, last - MOST_BEFORE) : last], series.nights[last:]
    if not past or any(one.night == last for one in series.changes):
        return None
    night = _compare(series, past, present, Verdict.NO_VERDICT)
    metric, (low, high) = series.metric, night.bounds
    if low is None or high is None or metric.direction is Direction.NEITHER:
        return night
    verdict, _ = judge(metric, night.ratio, low, high, allowed_loss(metric), by_chance=True)
    return replace(night, verdict=verdict) if verdict is Verdict.NO_DIFFERENCE else night


def _compare(
    series: Series,
    past: Sequence[MeasuredNight],
    present: Sequence[MeasuredNight],
    verdict: Verdict,
    ratio: float | None = None,
    alert: Alert | None = None,
) -> ShownChange:
    was = statistics.median(math.log(night.mean) for night in past)
    before, since = night_logs(past, present)
    if ratio is None:
        ratio = math.exp(statistics.median(since) - statistics.median(before))
    half = half_width(before, since, series.wandering, series.unit)
    return ShownChange(
        series,
        verdict,
        math.exp(was),
        math.exp(was) * ratio,
        ratio,
        None if half is None else ratio * math.exp(-half),
        None if half is None else ratio * math.exp(half),
        tuple(night.mean for night in series.nights[-SPARK_POINTS:]),
        present[0],
        alert,
    )
