"""Scores of a task, by the formulas of EleutherAI's lm-evaluation-harness (MIT).

A choice is scored by the log-likelihood of its tokens after the prompt. `accuracy` takes the
likeliest choice (`acc`), `accuracy_norm` that of the highest log-likelihood a byte (`acc_bytes`;
its `acc_norm` divides by characters, which is the same for ASCII). A standard error is that of a
mean over the rows: the sample deviation over the square root of their number. Where a row counts
several instructions, it comes from resampling rows.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_RESAMPLINGS = 1000
_SEED = 1234


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """Log-likelihoods of the choices of one question, in nats.

    Attributes:
        lengths: bytes of each choice.
        answer: place of the right one.
    """

    log_likelihoods: tuple[float, ...]
    lengths: tuple[int, ...]
    answer: int

    @property
    def choice(self) -> int:
        """Place of the likeliest choice; of equal ones the first."""
        return _first_highest(self.log_likelihoods)

    @property
    def choice_by_byte(self) -> int:
        """Place of the choice that is likeliest by byte."""
        pairs = zip(self.log_likelihoods, self.lengths, strict=True)
        return _first_highest([value / length for value, length in pairs])


@dataclass(frozen=True, slots=True)
class AnswerChecks:
    """Instructions of one prompt: whether its answer follows each of them."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def score_choices(
    rows: Sequence[ChoiceScores], reference: Sequence[ChoiceScores] = ()
) -> dict[str, float]:
    """Return accuracies by metric.

    Args:
        reference: of the model in float, on the same questions.
    """
    values = _with_error("accuracy", [row.choice == row.answer for row in rows])
    values |= _with_error("accuracy_norm", [row.choice_by_byte == row.answer for row in rows])
    if reference:
        pairs = list(zip(rows, reference, strict=True))
        values["accuracy_float"] = statistics.fmean(row.choice == row.answer for row in reference)
        values["accuracy_norm_float"] = statistics.fmean(
            row.choice_by_byte == row.answer for row in reference
        )
        values["choice_agreement"] = statistics.fmean(a.choice == b.choice for a, b in pairs)
    return values


def score_answers(rows: Sequence[AnswerChecks]) -> dict[str, float]:
    """Return IFEval's four accuracies by metric: of prompts and of instructions."""
    values: dict[str, float] = {}
    for how, of in _CHECKS.items():
        checks = [of(row) for row in rows]
        values |= _with_error(f"prompts_{how}", [all(row) for row in checks])
        values[f"instructions_{how}"] = _share(checks)
        if len(rows) > 1:
            values[f"instructions_{how}_error"] = _resampled_error(checks)
    return values


_CHECKS: Mapping[str, Callable[[AnswerChecks], tuple[bool, ...]]] = MappingProxyType(
    {"strict": lambda row: row.strict, "loose": lambda row: row.loose}
)


def _first_highest(values: Sequence[float]) -> int:
    return values.index(max(values))


def _with_error(key: str, hits: Sequence[bool]) -> dict[str, float]:
    values = {key: statistics.fmean(hits)}
    if len(hits) > 1:
        values[f"{key}_error"] = statistics.stdev(map(float, hits)) / math.sqrt(len(hits))
    return values


def _share(rows: Sequence[tuple[bool, ...]]) -> float:
    return statistics.fmean(hit for row in rows for hit in row)


def _resampled_error(rows: Sequence[tuple[bool, ...]]) -> float:
    draw = random.Random(_SEED)  # noqa: S311
    return statistics.stdev(_share(draw.choices(rows, k=len(rows))) for _ in range(_RESAMPLINGS))
