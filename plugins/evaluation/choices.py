"""Log-likelihoods of choices, from the logits of decode steps.

A choice of n tokens needs the logits after the prompt and after each of its first n - 1 tokens. So
choices that differ in their last token alone, as letters do, share one window of steps, and so do
those that begin alike. Genie's accuracy API is no alternative: it gives one perplexity for a window
as long as the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtimes.base import StepWindow
from harness.runtimes.tokenizer import encode
from plugins.evaluation.scores import ChoiceScores

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """A question in tokens.

    Attributes:
        prompt: tokens before each choice.
        choices: tokens of each.
        lengths: bytes of each.
        answer: place of the right one.
        bos: whether bos stands before the prompt.
    """

    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    answer: int
    bos: bool = True

    @property
    def windows(self) -> list[StepWindow]:
        """The fewest windows whose steps give all choices."""
        longest: list[tuple[int, ...]] = []
        for choice in sorted(self.choices, key=len, reverse=True):
            if not any(_gives(window, choice) for window in longest):
                longest.append(choice)
        return [StepWindow(self.prompt, following, self.bos) for following in longest]

    def scores(self, logits: "Sequence[npt.NDArray[np.float32]]") -> ChoiceScores:
        """Score the choices.

        Args:
            logits: [steps, vocab] of each window.

        Raises:
            ValueError: they are of other steps, or no numbers.
        """
        rows = []
        windows = self.windows
        for choice in self.choices:
            place = next(n for n, one in enumerate(windows) if _gives(one.following, choice))
            rows.append(_log_likelihood(logits[place], choice))
        return ChoiceScores(tuple(rows), self.lengths, self.answer)


def encode_question(
    tokenizer: "Tokenizer", prompt: str, choices: Sequence[str], answer: int, *, chat: bool = False
) -> EncodedQuestion:
    """Encode a prompt, and the choices that follow it.

    Spaces at the end of a prompt go to the choices, and a choice is encoded with the prompt before
    it, as lm-evaluation-harness does.

    Args:
        chat: whether a chat template made the prompt: bos is in it, and the choice follows without
            a space.

    Raises:
        ValueError: a choice, or the prompt, has no token of its own.
    """
    text = prompt.rstrip()
    before = encode(tokenizer, text)
    delimiter = "" if chat else " "
    tokens = [encode(tokenizer, prompt + delimiter + choice)[len(before) :] for choice in choices]
    if not before or not all(tokens):
        empty_choice = next(
            (choice for choice, ids in zip(choices, tokens, strict=True) if not ids), ""
        )
        what = f"the choice {empty_choice[:40]!r}" if before else "the prompt"
        raise ValueError(f"{what} has no token of its own")
    lengths = tuple(len(choice.encode()) for choice in choices)
    return EncodedQuestion(tuple(before), tuple(map(tuple, tokens)), lengths, answer, not chat)


def _gives(window: Sequence[int], choice: Sequence[int]) -> bool:
    """Return whether the steps of a window are those of a choice; its last token is free."""
    return len(window) >= len(choice) and tuple(window[: len(choice) - 1]) == tuple(choice[:-1])


def _log_likelihood(logits: "npt.NDArray[np.float32]", choice: Sequence[int]) -> float:
    rows = logits[: len(choice)].astype(np.float64)
    if len(rows) < len(choice) or rows.shape[-1] <= max(choice) or not np.isfinite(rows).all():
        raise ValueError(f"logits of shape {logits.shape} do not score {len(choice)} tokens")
    highest = rows.max(axis=-1, keepdims=True)
    totals = highest[:, 0] + np.log(np.exp(rows - highest).sum(axis=-1))
    return float((rows[np.arange(len(choice)), list(choice)] - totals).sum())
