"""Interval around the mean of paired differences.

It is exact and asks for no normal distribution, only for a symmetric one: of n differences take the
means of all 2^n - 1 subsets; in order, they cut the line into 2^n pieces that are equally likely to
hold the centre (J. A. Hartigan, "Using subsample values as typical values", JASA 64, 1969, pages
1303-1317). Leaving out the k lowest and k highest pieces leaves an interval of confidence
1 - 2k/2^n; it holds the changes that an exact sign-flip test would not reject. For more than 14
differences, subsets are drawn at random, always the same ones.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ERROR_RATE = 0.05
"""Chance of a false alarm, over all metrics of one comparison."""
_MOST_EXHAUSTED = 14
_SEED = 20


def min_pairs(metrics: int = 1) -> int:
    """Compute the fewest pairs that can show a difference: fewer could all agree by chance."""
    return math.ceil(math.log2(metrics / ERROR_RATE))


def interval(differences: Sequence[float], share: float) -> tuple[float, float, float]:
    """Return both ends of an interval around the mean, and its confidence.

    Args:
        share: chance that the centre lies below it, and that it lies above.
    """
    means = _subset_means(np.asarray(differences))
    pieces = len(means) + 1
    tail = max(int(share * pieces), 1)
    in_order = np.sort(means)
    return float(in_order[tail - 1]), float(in_order[-tail]), 1 - 2 * tail / pieces


def _subset_means(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    size = len(values)
    if size <= _MOST_EXHAUSTED:
        numbers = np.arange(1, 2**size)[:, np.newaxis]
        subsets = (numbers >> np.arange(size)) & 1
    else:
        subsets = np.random.default_rng(_SEED).integers(0, 2, (2**_MOST_EXHAUSTED - 1, size))
        subsets = subsets[subsets.any(axis=1)]
    means: npt.NDArray[np.float64] = (subsets @ values) / subsets.sum(axis=1)
    return means
