"""Estimators of the ranges of activations, and the histograms that they see."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from buildlib.quantize.options import RangeName

BINS = 2048
_SATURATING = 1e-4
_PARTS = np.linspace(1.0, 0.1, 46)
Range = tuple[float, float]


@dataclass
class Histogram:
    """Counts of an activation's values over all text, in bins between its smallest and largest.

    Attributes:
        low, high: the smallest and the largest value.
        counts: of each bin, [BINS].
    """

    low: float
    high: float
    counts: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, low: float, high: float) -> "Histogram":
        """Return one without values; `low` is below `high`."""
        return cls(low, high, np.zeros(BINS, np.int64))

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count values."""
        if self.low < self.high:
            clipped = np.clip(values, self.low, self.high)
            self.counts += np.histogram(clipped, BINS, (self.low, self.high))[0]

    @property
    def centers(self) -> npt.NDArray[np.float64]:
        """The value in the middle of each bin, [BINS]."""
        edges = np.linspace(self.low, self.high, BINS + 1)
        centers: npt.NDArray[np.float64] = (edges[1:] + edges[:-1]) / 2
        return centers


class RangeEstimator(Protocol):
    """Chooses the range that the grid of an activation covers; values outside it saturate."""

    def __call__(self, histogram: Histogram, bits: int) -> Range:
        """Return (lowest, highest) for a grid of `bits`."""
        ...


def minmax(histogram: Histogram, bits: int) -> Range:
    """Return the smallest and the largest value: nothing saturates that the text has shown."""
    del bits
    return histogram.low, histogram.high


def percentile(histogram: Histogram, bits: int) -> Range:
    """Return the range of nearly all values, at the edges of bins.

    One in ten thousand saturates at each end.
    """
    del bits
    total = np.cumsum(histogram.counts)
    if not total[-1]:
        return histogram.low, histogram.high
    first = int(np.searchsorted(total, _SATURATING * total[-1], side="right"))
    last = int(np.searchsorted(total, (1 - _SATURATING) * total[-1]))
    step = (histogram.high - histogram.low) / BINS
    return histogram.low + first * step, histogram.low + (last + 1) * step


def mse(histogram: Histogram, bits: int) -> Range:
    """Return the range of the least square error: of rounding inside, of saturation outside.

    One end after the other shrinks while the error over the histogram falls.
    """
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


ESTIMATORS: Mapping[RangeName, RangeEstimator] = MappingProxyType(
    {"minmax": minmax, "percentile": percentile, "mse": mse}
)
