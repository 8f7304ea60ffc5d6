"""`RangeEstimator`: the Protocol of estimators, and the histogram of what they see."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BINS = 2048
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
