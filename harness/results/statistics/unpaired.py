"""Change between two sides that did not take turns.

Sessions are the unit of sampling: the logarithm of each session's mean is its device's own level
plus, for the new side, the change. Least squares gives the change, and Student's t its interval and
p-value. Devices that measured one side only say nothing about the change. Where an F-test finds
that the devices did not change alike, the change is that of the device that is farthest from the
others; its p-value and interval are adjusted for the choice by Bonferroni. Where many changes are
judged together, the p-values are adjusted by Benjamini and Hochberg ("Controlling the false
discovery rate", JRSS B 57, 1995, pages 289-300).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
DISAGREEMENT = 0.01
"""p-value of the F-test below which the devices did not change alike."""
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
        device: the one that changed, where it did so unlike the others; else None.
        by_device: new over old of each device that measured both.
    """

    ratio: float
    sessions: tuple[int, int]
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    device: str | None = None
    by_device: Mapping[str, float] = field(default_factory=dict)


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
    effects, squares = _fit(design, values)
    apart = np.column_stack([levels * new[:, None], levels])
    own_effects, own_squares = _fit(apart, values)
    by_device = dict(zip(shared, map(math.exp, own_effects), strict=False))
    counts = int(len(new) - new.sum()), int(new.sum())
    pooled = Estimate(math.exp(effects[0]), counts, by_device=by_device)
    freedom = len(values) - len(shared) - 1
    if min(counts) < MIN_SESSIONS or freedom < 1:
        return pooled
    from scipy import stats  # takes a while to load

    number, place, device = 1, 0, None
    own_freedom, more = len(values) - 2 * len(shared), len(shared) - 1
    if own_freedom >= 2 and more:
        noise = max(own_squares / own_freedom, 1e-18)
        if stats.f.sf((squares - own_squares) / more / noise, more, own_freedom) < DISAGREEMENT:
            changes = own_effects[: len(shared)]
            distance = np.abs(changes - np.median(changes)) + 1e-6 * np.abs(changes)
            place, number, design = int(distance.argmax()), len(shared), apart
            device, effects, squares, freedom = shared[place], own_effects, own_squares, own_freedom
            old = int((levels[:, place] * (1 - new)).sum())
            counts = old, int((levels[:, place] * new).sum())
    error = math.sqrt(squares / freedom * float(np.linalg.inv(design.T @ design)[place, place]))
    error = max(error, 1e-9)  # values that are all equal, as bytes can be
    effect = float(effects[place])
    confidence = 1 - (1 - CONFIDENCE) / number
    low, high = stats.t.interval(confidence, freedom, loc=effect, scale=error)
    p_value = min(2 * number * float(stats.t.sf(abs(effect) / error, freedom)), 1.0)
    return replace(
        pooled, ratio=math.exp(effect), sessions=counts, low=math.exp(low), high=math.exp(high),
        p_value=p_value, device=device,
    )  # fmt: skip


def _fit(design: Floats, values: Floats) -> tuple[Floats, float]:
    """Return the effects by least squares, and the sum of squared residuals."""
    effects, *_ = np.linalg.lstsq(design, values, rcond=None)
    residuals = values - design @ effects
    return np.asarray(effects, np.float64), float(residuals @ residuals)


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
