"""Bounds of a perplexity: a number, or a tolerance relative to the model in float.

A container is judged by its distance from the model that it was built from, in float on the host,
over the same tokens. Without a bound of the user's, the tolerance depends on the bits of the linear
layers (`default_tolerance`).
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from harness.errors import WrongUseError
from harness.results.records import OutputCheck, PerplexityDefinition, Run
from harness.words import pluralize

PERPLEXITY, PERPLEXITY_ERROR, PERPLEXITY_FLOAT, PERPLEXITY_QUANTIZED = (
    "perplexity",
    "perplexity_error",
    "perplexity_float",
    "perplexity_quantized_cpu",
)
REFERENCES = (PERPLEXITY_FLOAT, PERPLEXITY_QUANTIZED)
QUANTIZED_TOLERANCE = 0.01
"""From the quantized model on the CPU, which computes the same numbers."""
_EIGHT_BITS, _FOUR_BITS = 0.03, 0.10
_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?%")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_BITS = re.compile(r"W([0-9]{1,2})(?:/[0-9]{1,2})*A([0-9]{1,2})(?:/[0-9]{1,2})*(?:KV16)?")
"""`W4A16`; of `W4/8A16` the lowest number of bits counts, which stands first."""


def default_tolerance(precision: str | None) -> float:
    """Return how far from float a container of these bits may be, as a part of it.

    3 % where weights have 8 bits and activations 16; 10 % where either has fewer. The reference
    model of this project is 0.1 % off with W8A16, 4.4 % with W4A16 and 6.1 % with W4A8; llama.cpp
    states 7.5 % for Llama 3 8B in Q4_0, whose weights have 4 bits (tools/perplexity/README.md).
    """
    match = _BITS.fullmatch(precision or "")
    if match is None:
        return _EIGHT_BITS
    weights, activations = map(int, match.groups())
    return _EIGHT_BITS if weights >= 8 and activations >= 16 else _FOUR_BITS


@dataclass(frozen=True, slots=True)
class PerplexityBound:
    """The perplexity above which a container counts as broken.

    Attributes:
        limit: a perplexity; or, if `relative`, a part of the perplexity in float.
        relative: whether the device is held against the model in float: then a perplexity that is
            as far below it is no better, since the two cannot belong together.
    """

    limit: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """Read `20` as a perplexity, and `5%` as a tolerance relative to float.

        Raises:
            WrongUseError: it is neither.
        """
        words = str(text).strip()
        limit, relative = math.nan, False
        if isinstance(text, (int, float)):
            limit = float(text)
        elif percent := _PERCENT.fullmatch(words):
            limit, relative = float(percent[1]) / 100, True
        elif _NUMBER.fullmatch(words):
            limit = float(words)
        if not (limit > 0 if relative else 1 <= limit < math.inf):
            raise WrongUseError(
                f"{words[:20]!r} is no bound of a perplexity: give a number of at least 1, as 20, "
                "or a tolerance relative to the model in float, as 5%"
            )
        return cls(limit, relative)

    def __str__(self) -> str:
        return f"{self.limit * 100:g}%" if self.relative else f"{self.limit:g}"

    def check(self, values: Mapping[str, float], measured: str) -> OutputCheck:
        """Judge a perplexity.

        Args:
            values: by metric; `perplexity_float` too for a relative bound.
            measured: over which windows and text, in words.
        """
        device = values[PERPLEXITY]
        result = f"perplexity {device:.3f} over {measured}"
        if not self.relative:
            good = device <= self.limit
            verdict = f"{'at most' if good else 'above the bound of'} {self}"
            reason = f"{result} is {verdict} (--max-perplexity)"
            return OutputCheck(outcome="passed" if good else "failed", reason=reason)
        away = deviation(values, PERPLEXITY_FLOAT)
        if away is None:
            raise ValueError("a relative bound needs the perplexity in float")
        good = abs(away) <= self.limit
        verdict = f"{'within' if good else 'outside'} the tolerance of {self} (--max-perplexity)"
        reason = f"{result} is {away:+.1%} from the same model in float, {verdict}"
        return OutputCheck(outcome="passed" if good else "failed", reason=reason)


def standard_error(losses: Sequence[float]) -> float | None:
    """Compute the standard error of a text's perplexity; None for fewer than two windows.

    That of the mean loss is the standard deviation of the windows' over the root of their number.
    The delta method multiplies it by the perplexity, which is `exp` of that mean. Windows count as
    independent; the tokens of one are not.

    Args:
        losses: mean negative log-likelihood of each window in nats, all over as many tokens.
    """
    if len(losses) < 2:
        return None
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return math.exp(statistics.fmean(losses)) * error


def explain_chance(perplexity_float: float, n_vocab: int) -> str | None:
    """Return why a text measures little, if the model in float predicts it worse than by chance.

    A token that a model rules out costs as many nats as its logit lies below the others, and noise
    of quantization, of which the final norm makes slightly smaller logits, changes that cost: by
    2 % of the perplexity for a random model whose own texts are within 0.5 %.
    """
    if perplexity_float <= n_vocab:
        return None
    return (
        f"in float the model predicts this text worse than by chance (a perplexity of {n_vocab}), "
        "so the distance says little: score a text like those it was trained on"
    )


def last_values(run: Run) -> dict[str, float]:
    """Return a run's perplexity and references, by metric."""
    values = {key: run.values(key) for key in (PERPLEXITY, *REFERENCES)}
    return {key: series[-1] for key, series in values.items() if series}


def deviation(values: Mapping[str, float], reference: str) -> float | None:
    """Compute how far the device is from a reference, as a part of it; None if one is missing."""
    device, other = values.get(PERPLEXITY), values.get(reference)
    return None if device is None or not other else device / other - 1


def find_perplexity_faults(
    values: Mapping[str, float], precision: str | None = None
) -> tuple[str, ...]:
    """Say in words where the device's perplexity is too far from its references.

    Args:
        precision: of the container, as `W4A16`; None where it is unknown.
    """
    faults = []
    tolerance = default_tolerance(precision)
    away = deviation(values, PERPLEXITY_FLOAT)
    if away is not None and abs(away) > tolerance:
        faults.append(
            f"Perplexity on the device is {away:+.1%} from the same model in float, more than the "
            f"{tolerance:.0%} of {precision or 'a container of unknown precision'}: "
            f"--max-perplexity {math.ceil(abs(away) * 100)}% accepts it"
        )
    away = deviation(values, PERPLEXITY_QUANTIZED)
    if away is not None and abs(away) > QUANTIZED_TOLERANCE:
        faults.append(
            f"Perplexity on the device is {away:+.1%} from the same model quantized on the CPU, "
            f"more than {QUANTIZED_TOLERANCE:.0%}"
        )
    return tuple(faults)


def matches_references(values: Mapping[str, float], precision: str | None = None) -> bool:
    """Return whether the device's perplexity has a reference, and is near all that it has."""
    beside = any(deviation(values, reference) is not None for reference in REFERENCES)
    return beside and not find_perplexity_faults(values, precision)


def describe_scored(definition: PerplexityDefinition | None) -> str:
    """Describe the text that a perplexity is over: `8 windows, 1,280 tokens`."""
    if definition is None:
        return "an unknown number of windows"
    half = ", second halves" if definition.positions == "second_half" else ""
    windows, tokens = pluralize(definition.windows, "window"), definition.tokens
    return f"{windows}, {pluralize(tokens, 'token')}{half}"
