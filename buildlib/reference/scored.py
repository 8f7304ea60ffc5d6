"""Perplexity on the host over exactly the positions that Genie scores on a device."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from buildlib.checkpoint.config import LlamaConfig
from buildlib.reference.host_loop import HostLoop, token_losses
from buildlib.reference.runners import OnnxRunner


def window_perplexity(loop: HostLoop, windows: Sequence[Sequence[int]], bos: int) -> float:
    """`exp` of the mean negative log-likelihood of all tokens, each window led by bos.

    Args:
        windows: token ids without bos, each shorter than the context length.

    Raises:
        PromptTooLongError: a window does not fit into the context.
    """
    losses = []
    for window in windows:
        loop.reset()
        tokens = [bos, *window]
        losses.append(token_losses(loop.feed(tokens), tokens))
    return math.exp(float(np.concatenate(losses).mean()))


def onnx_perplexity(
    chains: Mapping[int, Sequence[Path]], config: LlamaConfig, windows: Sequence[Sequence[int]]
) -> float:
    """The same for ONNX models, float or QDQ, on ONNX Runtime's CPU provider.

    Args:
        chains: by AR, the parts of the model in the order of data flow.

    Raises:
        ModelFileError: a file is no model that can run.
    """
    runners = {ar: [OnnxRunner(path) for path in paths] for ar, paths in chains.items()}
    with HostLoop(runners, config) as loop:
        return window_perplexity(loop, windows, config.bos_token_id)
