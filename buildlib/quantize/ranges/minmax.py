"""The whole range: nothing saturates that the text has shown."""

from buildlib.quantize.ranges.base import Histogram, Range


def estimate(histogram: Histogram, bits: int) -> Range:
    """Return the smallest and the largest value."""
    del bits
    return histogram.low, histogram.high
