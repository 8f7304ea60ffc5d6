"""Warm-up detection: where a series of values becomes steady.

The rule is made for the few, expensive repetitions of a phone. A tail of the values is steady when
its first value is in line with the others, and its two halves have the same median, both within a
tolerance and within what the noise explains. The noise is taken from the differences of neighbours
(von Neumann's estimator, with the median absolute deviation in place of the mean square): a drift
is large in the values and small in their differences, so that it cannot pass for noise. As in
pyperf's calibration the first value may not be an outlier and windows are compared, but pyperf's
two windows of 20 values would cost more than most benchmarks on a phone have.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TOLERANCE = 0.05
"""Differences below this part of the median do not matter."""
MIN_STEADY = 3
"""The fewest values of a steady tail."""
_OUTLIER = 3.0
_MOST_FIRST, _MOST_DRIFT = 4.0, 2.0
"""The most that noise may excuse, in tolerances: few values say little about their noise."""
_TO_SIGMA = 1.4826  # of a median absolute deviation, for a normal distribution
_MEDIAN_SD = 1.2533  # of a median over n values, times sigma / sqrt(n)


@dataclass(frozen=True, slots=True)
class Warmup:
    """The warm-up at the start of a series.

    Attributes:
        count: values that belong to warm-up; all but the last few if it did not end.
        reached: whether the values are steady after it.
        reason: in words.
    """

    count: int
    reached: bool
    reason: str


def detect_warmup(values: Sequence[float], *, fewest: int = MIN_STEADY) -> Warmup:
    """Find the shortest start of the values after which they are steady.

    Args:
        values: of one metric, in the order in which they were measured.
        fewest: steady values to ask for, at least 2.
    """
    if fewest < 2 or not all(math.isfinite(value) for value in values):
        raise ValueError("warm-up detection needs finite values, at least two of them steady")
    for start in range(len(values) - fewest + 1):
        if _steady(values[start:]):
            reason = f"steady from repetition {start + 1} on" if start else "steady from the start"
            return Warmup(start, reached=True, reason=reason)
    if len(values) < fewest:
        reason = f"not reached: {fewest} steady values are needed, and there are {len(values)}"
        return Warmup(0, reached=False, reason=reason)
    reason = f"not reached: no {fewest} of the {len(values)} values in a row are steady to the end"
    return Warmup(len(values) - fewest, reached=False, reason=reason)


def _steady(values: Sequence[float]) -> bool:
    first, others = values[0], values[1:]
    least = TOLERANCE * abs(statistics.median(values))
    bound = _OUTLIER * _noise(others)
    if abs(first - statistics.median(others)) > max(least, min(bound, _MOST_FIRST * least)):
        return False
    half = len(values) // 2
    distance = abs(statistics.median(values[:half]) - statistics.median(values[-half:]))
    chance = _OUTLIER * math.sqrt(2 / half) * _MEDIAN_SD * _noise(values)
    return distance <= max(least, min(chance, _MOST_DRIFT * least))


def _noise(values: Sequence[float]) -> float:
    """Estimate the standard deviation of the noise, without drift."""
    steps = [after - before for before, after in pairwise(values)]
    if not steps:
        return 0.0
    centre = statistics.median(steps)
    return _TO_SIGMA * statistics.median(abs(step - centre) for step in steps) / math.sqrt(2)
