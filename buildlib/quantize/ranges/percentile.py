"""The range of nearly all values: one in ten thousand saturates at each end."""

import numpy as np

from buildlib.quantize.ranges.base import BINS, Histogram, Range

_SATURATING = 1e-4


def estimate(histogram: Histogram, bits: int) -> Range:
    """Return the range between the two percentiles, at the edges of bins."""
    del bits
    total = np.cumsum(histogram.counts)
    if not total[-1]:
        return histogram.low, histogram.high
    first = int(np.searchsorted(total, _SATURATING * total[-1], side="right"))
    last = int(np.searchsorted(total, (1 - _SATURATING) * total[-1]))
    step = (histogram.high - histogram.low) / BINS
    return histogram.low + first * step, histogram.low + (last + 1) * step
