"""Mean and spread of repetitions, and remarks on what keeps them from being trusted.

This is the only definition: reports, grades, comparisons, the command line and the pytest plugin
take theirs from here. Repetitions of one run share a session: the same process start, temperature
and clock. Spread between sessions is often far larger than within one, so with several sessions the
session is the unit of sampling: the mean is the mean of the sessions' means, and the standard
deviation is theirs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.results.metrics import Metric

SPREAD_LIMIT = 0.10
"""Standard deviation over mean from which a result is called unstable; pyperf's limit."""
EXTREME_LIMIT = 0.50
"""Distance of the smallest or largest value from the mean, over the mean; pyperf's limit."""
FIRST_LIMIT = 0.10
"""Distance of the first repetition from the median of the others, over that median."""
MIN_REPETITIONS = 3
"""Fewer repetitions say almost nothing about spread."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Measured repetitions of one metric in one or several sessions.

    Attributes:
        n: repetitions in all sessions, warm-ups not counted.
        sd: sample standard deviation of repetitions, or of session means if there are several
            sessions; None for a single value.
        median: of all repetitions, as are `minimum` and `maximum`.
    """

    n: int
    sessions: int
    mean: float
    sd: float | None
    median: float
    minimum: float
    maximum: float

    @property
    def cv(self) -> float | None:
        """Coefficient of variation: standard deviation over mean."""
        return None if self.sd is None or self.mean == 0 else self.sd / abs(self.mean)

    def show(self, metric: Metric) -> str:
        """Format as `mean ± sd` in the metric's shown unit, without naming it."""
        mean, spread = metric.format(self.mean), self.show_spread(metric)
        return f"{mean} ± {spread}" if spread else mean

    def show_spread(self, metric: Metric) -> str:
        """Format the standard deviation; empty for a single value, whose spread is unknown."""
        return "" if self.sd is None else metric.format(self.sd, beside=self.mean)


def session_means(sessions: Sequence[Sequence[float]]) -> list[float]:
    """Compute the mean of each session that has repetitions."""
    return [statistics.fmean(values) for values in sessions if values]


def summarise(sessions: Sequence[Sequence[float]]) -> Stats | None:
    """Compute the statistics of sessions; None if no session has a repetition."""
    measured = [values for values in sessions if values]
    everything = [value for values in measured for value in values]
    if not everything:
        return None
    units = session_means(measured) if len(measured) > 1 else everything
    return Stats(
        n=len(everything),
        sessions=len(measured),
        mean=statistics.fmean(units),
        sd=statistics.stdev(units) if len(units) > 1 else None,
        median=statistics.median(everything),
        minimum=min(everything),
        maximum=max(everything),
    )


def remarks(sessions: Sequence[Sequence[float]], *, on_spread: bool = True) -> tuple[str, ...]:
    """Say in words what makes the numbers untrustworthy; empty if nothing does.

    Args:
        on_spread: also what their spread says; no on the emulator, where speeds mean nothing.
    """
    stats = summarise(sessions)
    if stats is None:
        return ("only warm-ups, no measured repetition",)
    if stats.n == 1:
        return ("one repetition only, so its spread is unknown",)
    found = []
    if stats.n < MIN_REPETITIONS:
        found.append(f"{stats.n} repetitions only")
    if stats.mean > 0 and on_spread:
        found += _spread(stats)
        found += _first(sessions)
    return tuple(found)


def _spread(stats: Stats) -> list[str]:
    found = []
    if stats.cv is not None and stats.cv >= SPREAD_LIMIT:
        between = " between sessions" if stats.sessions > 1 else ""
        found.append(f"the standard deviation{between} is {stats.cv:.0%} of the mean")
    above = stats.maximum / stats.mean - 1
    below = 1 - stats.minimum / stats.mean
    if above >= EXTREME_LIMIT:
        found.append(f"the largest value is {above:.0%} above the mean")
    if below >= EXTREME_LIMIT:
        found.append(f"the smallest value is {below:.0%} below the mean")
    return found


def _first(sessions: Sequence[Sequence[float]]) -> list[str]:
    """Return a remark if a first repetition is far from the others: the warm-up was too short."""
    apart = 0.0
    for values in sessions:
        if len(values) >= MIN_REPETITIONS:
            others = statistics.median(values[1:])
            calm = max(values[1:]) - min(values[1:]) < FIRST_LIMIT / 2 * others
            distance = abs(values[0] / others - 1) if others else 0.0
            if calm and distance >= FIRST_LIMIT:
                apart = max(apart, distance)
    if not apart:
        return []
    return [f"the first repetition is {apart:.0%} off the others: more warm-up may be needed"]
