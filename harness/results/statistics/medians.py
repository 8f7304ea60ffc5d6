"""The difference between the medians of two stretches of nights, with its interval.

Nights that go together are worth fewer independent ones. How many is known in two ways: of all
movements (`SeriesJudgement.wandering`), or of those that are faster than a level's (`go_together`).
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

MIN_BEFORE = 3
"""Fewer nights before say nothing about how much nights differ."""
CONFIDENCE = 0.95
CAUTION = 5.0
"""Times that nights vary together more than was seen: a few cannot show slow movements."""
_LEVEL, _TOGETHER, _CLIP = 15, 5, 3.0
"""Nights on both sides that give a level; nights apart that may go together; bound of outliers."""


def half_width(
    before: Sequence[float],
    since: Sequence[float],
    wandering: Sequence[float],
    unit: float = 0.0,
    caution: float = CAUTION,
) -> float | None:
    """Compute half of the interval around the difference of the medians of two stretches of nights.

    Student's t, with nights that go together worth fewer independent ones (effective sample size).
    The variance of a median is the greater one of that of normal values with the spread of both
    sides, and of the side's own by its ranks (J. W. McKean and R. M. Schrader, Communications in
    Statistics B 13, 1984), which sees two modes.

    Args:
        before, since: logarithms of nights.
        unit, wandering: as `SeriesJudgement` has them. Each level may be off by half a unit.
        caution: times that nights vary together more than that.
    """
    if len(before) < MIN_BEFORE:
        return None
    from scipy.special import stdtrit  # Student's t of `scipy.stats`, which takes a second to load

    sides = [side for side in (before, since) if len(side) > 1]
    inflation = {len(side): _inflation(len(side), wandering, caution) for side in (before, since)}
    squares = math.fsum(statistics.pvariance(side) * len(side) for side in sides)
    freedom = max(len(before) - inflation[len(before)], 1.0)
    freedom += max(len(since) - inflation[len(since)], 0.0)
    variance = math.fsum(
        inflation[len(side)] * _variance_of_median(side, squares / freedom)
        for side in (before, since)
    )
    variance += unit**2 / 6
    worth = math.fsum(len(side) / inflation[len(side)] for side in (before, since))
    quantile = float(stdtrit(max(worth - 2, 2.0), (1 + CONFIDENCE) / 2))
    return quantile * math.sqrt(variance)


def _variance_of_median(side: Sequence[float], variance: float) -> float:
    """Return the variance of the median of independent nights.

    Args:
        variance: of a night.
    """
    count, in_order = len(side), sorted(side)
    if count < 3:
        return variance / count
    rank = max(round((count + 1) / 2 - math.sqrt(count)), 1)
    by_ranks = (in_order[-rank] - in_order[rank - 1]) / 4
    return max(math.pi / 2 * variance / count, by_ranks**2)


def _inflation(nights: int, wandering: Sequence[float], caution: float) -> float:
    """Return how many nights are worth one independent night: more than was seen of them so far."""
    seen = wandering[min(nights, len(wandering)) - 1] - 1
    return 1 + caution * seen * math.sqrt(max(1.0, nights / len(wandering)))


def go_together(nights: Sequence[float]) -> float:
    """Return how many nights are worth one independent night, apart from slow movements.

    The sum of autocorrelations around a running median.
    """
    logs = np.array(nights)
    around = np.lib.stride_tricks.sliding_window_view(
        np.pad(logs, _LEVEL, constant_values=np.nan), 2 * _LEVEL + 1
    )
    in_order = np.sort(around, axis=1)  # what is beyond the ends comes last
    counts, rows = np.count_nonzero(~np.isnan(around), axis=1), np.arange(len(logs))
    away = logs - (in_order[rows, (counts - 1) // 2] + in_order[rows, counts // 2]) / 2
    bound = _CLIP * 1.4826 * float(np.median(np.abs(away)))
    away = np.clip(away, -bound, bound)
    away -= away.mean()
    square = float(away @ away)
    if not square:
        return 1.0
    apart = range(1, min(_TOGETHER + 1, len(away)))
    return max(1.0, 1 + 2 * sum(float(away[lag:] @ away[:-lag]) for lag in apart) / square)
