"""The range of the least square error: what rounding gains, against what saturation loses."""

import numpy as np

from buildlib.quantize.ranges.base import Histogram, Range

_PARTS = np.linspace(1.0, 0.1, 46)


def estimate(histogram: Histogram, bits: int) -> Range:
    """Shrink one end after the other while the squared error over the histogram falls."""
    low, high = min(histogram.low, 0.0), max(histogram.high, 0.0)
    if not histogram.counts.any():
        return low, high
    centers, counts = histogram.centers, histogram.counts.astype(np.float64)

    def error(low: float, high: float) -> float:
        step = (high - low) / ((1 << bits) - 1)
        if step <= 0:
            return np.inf
        rounded = np.rint((np.clip(centers, low, high) - low) / step) * step + low
        return float((counts * (rounded - centers) ** 2).sum())

    high = min((high * part for part in _PARTS), key=lambda one: error(low, one))
    low = min((low * part for part in _PARTS), key=lambda one: error(one, high))
    return low, high
