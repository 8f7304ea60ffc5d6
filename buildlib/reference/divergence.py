"""Distance of the next-token distributions of two models, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Divergence:
    """Distance of a model from the one that it was made of, over some steps.

    Attributes:
        kl: mean over the steps of `D(float || device) = sum_v p_v * (ln p_v - ln q_v)` in nats, p
            being the distribution of the model in float and q that of the device: what it costs to
            take q for p. 0 where they are equal, and never below.
        top1: part of the steps whose most probable token is the same.
        loss, loss_float: mean negative log-likelihood of the tokens that followed, in nats.
        steps: number of steps.
    """

    kl: float
    top1: float
    loss: float
    loss_float: float
    steps: int


def measure_divergence(
    device: Sequence[Logits], reference: Sequence[Logits], following: Sequence[Sequence[int]]
) -> Divergence:
    """Compare the logits of two models on the same texts.

    The direction and the names are those of llama.cpp's `--kl-divergence`: "Mean KLD" and "Same top
    p" (github.com/ggml-org/llama.cpp, tools/perplexity).

    Args:
        device: logits [steps, vocab] of each text.
        reference: of the model in float.
        following: token that follows at each step.

    Raises:
        ValueError: they are of different steps or vocabularies, or not finite.
    """
    totals = np.zeros(4)
    steps = 0
    for ours, theirs, tokens in zip(device, reference, following, strict=True):
        if ours.shape != theirs.shape or len(ours) != len(tokens):
            raise ValueError(f"logits {ours.shape} beside {theirs.shape} of {len(tokens)} steps")
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            raise ValueError("logits that are not finite")
        q, p = _log_softmax(ours), _log_softmax(theirs)
        rows = np.arange(len(tokens))
        same = ours.argmax(axis=1) == theirs.argmax(axis=1)
        totals += (
            float((np.exp(p) * (p - q)).sum()),
            float(same.sum()),
            float(-q[rows, tokens].sum()),
            float(-p[rows, tokens].sum()),
        )
        steps += len(tokens)
    kl, top1, loss, loss_float = (float(total) / steps for total in totals)
    return Divergence(max(kl, 0.0), top1, loss, loss_float, steps)


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    found: npt.NDArray[np.float64] = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return found
