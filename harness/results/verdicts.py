"""Verdicts: the words, the losses that are allowed, and the sentence that goes with a figure.

Gate, comparison, histories and reports judge and speak through this module.
"""

from collections.abc import Iterable
from enum import StrEnum

from harness.errors import BAD, GOOD, NO_ANSWER
from harness.results.metrics import Metric, Use
from harness.words import NO_VALUE, percent

THRESHOLD = 0.05
PERPLEXITY_THRESHOLD = 0.005
"""A perplexity is exact."""


class Verdict(StrEnum):
    """The outcome of a comparison."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    NO_DIFFERENCE = "no difference seen"
    NO_VERDICT = "no verdict"


def verdict_exit_code(verdict: Verdict) -> int:
    """Return the exit code of a verdict: 1 for a regression, 2 for no verdict."""
    return {"regressed": BAD, "no verdict": NO_ANSWER}.get(verdict.value, GOOD)


def allowed_loss(metric: Metric) -> float:
    """Return the part that may be lost without a regression: of a perplexity far less."""
    return PERPLEXITY_THRESHOLD if Use.EXACT in metric.use else THRESHOLD


def judge(
    metric: Metric, ratio: float, low: float, high: float, threshold: float, *, by_chance: bool
) -> tuple[Verdict, str]:
    """Judge a figure by the interval around it.

    Args:
        ratio: new over old.
        low, high: the interval; both equal `ratio` where there is no noise.
        by_chance: whether so many figures are judged that one of them may look like this loss.

    Returns:
        The verdict, and the sentence that explains it.
    """
    gain = metric.gain(ratio)
    worst, best = sorted((metric.gain(low), metric.gain(high)))
    if best < 0 and -gain > threshold and not by_chance:
        return Verdict.REGRESSED, _describe(-gain, -best, "worse")
    if worst > 0 and gain > threshold:
        return Verdict.IMPROVED, _describe(gain, worst, "better")
    if -worst > threshold:
        reason = f"it could be up to {-worst:.1%} worse, and the limit is {threshold:.1%}"
        return Verdict.NO_VERDICT, f"{reason}: sessions vary too much, so run more of them"
    return Verdict.NO_DIFFERENCE, f"a loss of more than {threshold:.1%} is ruled out"


def in_percent(ratio: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """Format a ratio and the interval around it as changes: `-9.5%`, `-10.9% to -8.2%`."""
    change = NO_VALUE if ratio is None else percent(ratio - 1)
    if low is None or high is None:
        return change, NO_VALUE
    return change, f"{percent(low - 1)} to {percent(high - 1)}"


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts; of none at all, no verdict."""
    unique = set(verdicts) or {Verdict.NO_VERDICT}
    order = (Verdict.REGRESSED, Verdict.NO_VERDICT, Verdict.IMPROVED)
    return next((verdict for verdict in order if verdict in unique), Verdict.NO_DIFFERENCE)


def _describe(size: float, least: float, direction: str) -> str:
    words = f"{percent(size, signed=False)} {direction}"
    return words if size == least else f"{words} (at least {percent(least, signed=False)})"
