"""Change between two sides that did not take turns.

Sessions are the unit of sampling: the logarithm of each session's mean is its device's own level
plus, for the new side, the change. Least squares gives the change, and Student's t its interval and
p-value. Devices that measured one side only say nothing about the change. Where many changes are
judged together, the p-values are adjusted by Benjamini and Hochberg ("Controlling the false
discovery rate", JRSS B 57, 1995, pages 289-300).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
MIN_SESSIONS = 2
"""Sessions of each side; with fewer, nothing is known of their spread."""

Sessions = Sequence[tuple[str, float]]
"""Device and mean of each session of a side."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The change between two sides.

    Attributes:
        ratio: new over old.
        sessions: old and new ones on devices that measured both.
        low, high: the interval of the ratio; None with fewer than `MIN_SESSIONS` of a side.
        p_value: two-sided, of no change, before any adjustment; None likewise.
    """

    ratio: float
    sessions: tuple[int, int]
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


def estimate(before: Sessions, after: Sessions) -> Estimate | None:
    """Estimate the change, each device having a level of its own; None if no device has both."""
    shared = sorted({device for device, _ in before} & {device for device, _ in after})
    if not shared:
        return None
    sides = [(device, mean, 0.0) for device, mean in before if device in shared]
    sides += [(device, mean, 1.0) for device, mean in after if device in shared]
    values = np.log([mean for _, mean, _ in sides])
    new = np.array([side for _, _, side in sides])
    levels = np.array([[float(device == one) for one in shared] for device, _, _ in sides])
    design = np.column_stack([new, levels])
    effects, *_ = np.linalg.lstsq(design, values, rcond=None)
    ratio = math.exp(effects[0])
    counts = int(len(new) - new.sum()), int(new.sum())
    freedom = len(values) - len(shared) - 1
    if min(counts) < MIN_SESSIONS or freedom < 1:
        return Estimate(ratio, counts)
    from scipy import stats  # takes a while to load

    residuals = values - design @ effects
    variance = float(residuals @ residuals) / freedom
    error = math.sqrt(variance * float(np.linalg.inv(design.T @ design)[0, 0]))
    error = max(error, 1e-9)  # values that are all equal, as bytes can be
    low, high = stats.t.interval(CONFIDENCE, freedom, loc=effects[0], scale=error)
    p_value = 2 * float(stats.t.sf(abs(effects[0]) / error, freedom))
    return Estimate(ratio, counts, math.exp(low), math.exp(high), p_value)


def find_discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which of several changes are some, of which at most this part is expected to be none.

    Args:
        p_values: of no change, one for each.
    """
    if not p_values:
        return []
    from scipy import stats

    adjusted = stats.false_discovery_control(p_values, method="bh")
    return [bool(p <= rate) for p in adjusted]
