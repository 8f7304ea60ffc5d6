"""Distance of the next-token distributions of two models, step by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Divergence:
    """Distance of a model from the one that it was made of, over some steps.

    Direction and names are those of llama.cpp's `--kl-divergence`: "Mean KLD" and "Same top p"
    (github.com/ggml-org/llama.cpp, tools/perplexity).

    Attributes:
        kl: mean over the steps of `D(float || device) = sum_v p_v * (ln p_v - ln q_v)` in nats, p
            being the distribution of the model in float and q that of the device: the cost of
            taking q for p. 0 where they are equal, and never below.
        top1: part of the steps with the same most probable token.
        loss, loss_float: mean negative log-likelihood of the tokens that followed, in nats.
        steps: number of steps.
        error: standard error of `loss - loss_float`, with steps independent of each other.
        sqnr_db: 10 log10(sum(a^2) / sum((a - b)^2)) of the logits, a being those of the model in
            float; infinite where they are equal.
        relative: max|a - b| / max|a| of the logits.
    """

    kl: float
    top1: float
    loss: float
    loss_float: float
    steps: int
    error: float = 0.0
    sqnr_db: float = math.nan
    relative: float = math.nan

    @property
    def perplexity(self) -> float:
        """`exp` of the loss."""
        return math.exp(self.loss)

    @property
    def perplexity_float(self) -> float:
        """`exp` of the loss of the model in float, over the same steps."""
        return math.exp(self.loss_float)

    @property
    def metrics(self) -> dict[str, float]:
        """The measures by the names that results store them under."""
        return {
            "perplexity": self.perplexity,
            "perplexity_float": self.perplexity_float,
            "kl_divergence": self.kl,
            "top1_agreement": self.top1,
        }


class DivergenceSums:
    """Sums over steps, which come some at a time.

    Attributes:
        steps: so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._totals = np.zeros(5)
        self._energies = np.zeros(2)
        self._largest = np.zeros(2)

    def add(self, ours: Logits, theirs: Logits, tokens: Sequence[int] | Tokens) -> None:
        """Add steps: their logits, those of the model in float, and the tokens that follow."""
        if ours.shape != theirs.shape or len(ours) != len(tokens):
            raise ValueError(f"logits {ours.shape} beside {theirs.shape} of {len(tokens)} steps")
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            raise ValueError("logits that are not finite")
        q, p = log_softmax(ours), log_softmax(theirs)
        rows = np.arange(len(tokens))
        rises = p[rows, tokens] - q[rows, tokens]
        same = ours.argmax(axis=1) == theirs.argmax(axis=1)
        self._totals += (
            float((np.exp(p) * (p - q)).sum()),
            float(same.sum()),
            float(-q[rows, tokens].sum()),
            float(-p[rows, tokens].sum()),
            float(np.square(rises).sum()),
        )
        noise = theirs.astype(np.float64) - ours
        self._energies += (
            float(np.square(theirs, dtype=np.float64).sum()),
            float((noise**2).sum()),
        )
        most = (float(np.abs(theirs).max()), float(np.abs(noise).max()))
        self._largest = np.maximum(self._largest, most)
        self.steps += len(tokens)

    def mean(self) -> Divergence:
        """Return the means over all steps so far."""
        kl, top1, loss, loss_float, squares = (float(one) / self.steps for one in self._totals)
        variance = max(squares - (loss - loss_float) ** 2, 0.0)
        error = math.sqrt(variance / self.steps)
        signal, noise = map(float, self._energies)
        scale, difference = map(float, self._largest)
        return Divergence(
            max(kl, 0.0),
            top1,
            loss,
            loss_float,
            self.steps,
            error,
            decibels(signal, noise),
            difference and (difference / scale if scale else math.inf),
        )


def sqnr_db(reference: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> float:
    """Return `decibels` of a tensor beside the difference of another from it."""
    a = reference.astype(np.float64)
    return decibels(float(np.sum(a**2)), float(np.sum((a - found) ** 2)))


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): infinite without noise, NaN if either is not finite.

    No signal beside noise gives minus infinity.
    """
    if math.isnan(signal) or math.isnan(noise) or math.isinf(signal):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and not math.isinf(noise) else -math.inf


def token_losses(logits: Logits, following: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the negative log-likelihood [n] of the tokens that follow, given logits [n, vocab]."""
    losses: npt.NDArray[np.float64] = -log_softmax(logits)[np.arange(len(following)), following]
    return losses


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Return the logarithms of the probabilities, in the same shape."""
    scores: npt.NDArray[np.float64] = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores
