"""Whether B is worse than A, from sessions that took turns on the same phone.

Each pair of sessions gives one number, the logarithm of B over A, so that what both shared (the
phone, the hour, the room) falls out. The interval around their mean is exact and asks for no normal
distribution, only for a symmetric one: of n such numbers take the means of all 2^n - 1 subsets; in
order, they cut the line into 2^n pieces that are equally likely to hold the centre (J. A. Hartigan,
"Using subsample values as typical values", JASA 64, 1969, pages 1303-1317). Leaving out the k
lowest and k highest pieces leaves an interval of confidence 1 - 2k/2^n; it holds the changes that
an exact sign-flip test would not reject. For more than 14 pairs, subsets are drawn at random,
always the same ones.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from harness.words import counted

THRESHOLD = 0.05
ERROR_RATE = 0.05
"""Chance to report a regression where there is none, over all metrics of one comparison."""
_MOST_EXHAUSTED = 14
_SEED = 20

Pair = tuple[Sequence[float], Sequence[float]]


class Verdict(StrEnum):
    """What a comparison found."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    NO_DIFFERENCE = "no difference seen"
    NOT_ENOUGH_DATA = "not enough data"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of A and B.

    Attributes:
        ratio: B over A, the geometric mean over the pairs; None without a pair.
        low, high: an interval around `ratio`; None where there are too few pairs for one.
        confidence: of that interval.
        pairs: number of pairs of sessions.
        reason: the verdict in words.
    """

    verdict: Verdict
    ratio: float | None
    low: float | None
    high: float | None
    confidence: float
    pairs: int
    reason: str


def pairs_needed(metrics: int = 1, *, error_rate: float = ERROR_RATE) -> int:
    """The fewest pairs that can show a difference: with fewer, all could agree by chance."""
    return math.ceil(math.log2(metrics / error_rate))


def compare(
    pairs: Sequence[Pair],
    *,
    higher_is_better: bool,
    threshold: float = THRESHOLD,
    metrics: int = 1,
    error_rate: float = ERROR_RATE,
) -> Comparison:
    """Compare the sessions of A with those of B.

    Args:
        pairs: measured repetitions of A and of B, of sessions that ran one after the other on one
            device; a pair with an empty side does not count.
        threshold: a loss up to that part of A is none.
        metrics: how many metrics are compared together; the error rate is shared out among them.

    Raises:
        ValueError: a value is not finite or not above 0.
    """
    whole = [(a, b) for a, b in pairs if a and b]
    if not all(math.isfinite(v) and v > 0 for a, b in whole for v in (*a, *b)):
        raise ValueError("only finite values above 0 can be compared")
    share = error_rate / metrics
    logs = [math.log(statistics.median(b)) - math.log(statistics.median(a)) for a, b in whole]
    ratio = math.exp(statistics.fmean(logs)) if logs else None
    needed = pairs_needed(metrics, error_rate=error_rate)
    if ratio is None or len(logs) < needed:
        found = counted(len(logs), "pair")
        reason = f"{found} of sessions, and {needed} are needed to tell chance from change"
        return Comparison(
            Verdict.NOT_ENOUGH_DATA, ratio, None, None, 1 - 2 * share, len(logs), reason
        )
    low, high, confidence = _interval(logs, share)
    low, high = math.exp(low), math.exp(high)
    verdict, reason = _judge(
        *_gains(ratio, low, high, higher_is_better=higher_is_better), threshold
    )
    return Comparison(verdict, ratio, low, high, confidence, len(logs), reason)


def _interval(values: Sequence[float], share: float) -> tuple[float, float, float]:
    means = _subset_means(np.asarray(values))
    pieces = len(means) + 1
    cut = max(int(share * pieces), 1)
    ordered = np.sort(means)
    return float(ordered[cut - 1]), float(ordered[-cut]), 1 - 2 * cut / pieces


def _subset_means(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    size = len(values)
    if size <= _MOST_EXHAUSTED:
        numbers = np.arange(1, 2**size)[:, np.newaxis]
        chosen = (numbers >> np.arange(size)) & 1
    else:
        chosen = np.random.default_rng(_SEED).integers(0, 2, (2**_MOST_EXHAUSTED - 1, size))
        chosen = chosen[chosen.any(axis=1)]
    means: npt.NDArray[np.float64] = (chosen @ values) / chosen.sum(axis=1)
    return means


def _gains(
    ratio: float, low: float, high: float, *, higher_is_better: bool
) -> tuple[float, float, float]:
    """The change for the better, its worst and its best case, as parts of A."""
    if higher_is_better:
        return ratio - 1, low - 1, high - 1
    return 1 - ratio, 1 - high, 1 - low


def _judge(gain: float, worst: float, best: float, threshold: float) -> tuple[Verdict, str]:
    limit = f"{threshold:.1%}"
    if best < 0 and -gain > threshold:
        return Verdict.REGRESSED, f"B is {-gain:.1%} worse than A (at least {-best:.1%})"
    if worst > 0 and gain > threshold:
        return Verdict.IMPROVED, f"B is {gain:.1%} better than A (at least {worst:.1%})"
    if -worst > threshold:
        told = f"B could be up to {-worst:.1%} worse than A, and the limit is {limit}"
        return Verdict.NOT_ENOUGH_DATA, f"{told}: sessions vary too much, so more are needed"
    return Verdict.NO_DIFFERENCE, f"a loss of more than {limit} is ruled out"
