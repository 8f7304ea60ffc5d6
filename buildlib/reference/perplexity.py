"""Perplexity on the host over exactly the positions that Genie scores on a device."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from buildlib.checkpoint.config import DecoderConfig
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner


def onnx_perplexity(
    chains: Mapping[int, Sequence[Path]], config: DecoderConfig, windows: Sequence[Sequence[int]]
) -> float:
    """Return the perplexity of ONNX models, float or QDQ, on ONNX Runtime's CPU provider.

    It is `exp` of the mean negative log-likelihood of all tokens, each window led by bos.

    Args:
        chains: parts of the model in order, by AR.
        config: configuration of the model.
        windows: token ids without bos, each shorter than the context length.

    Raises:
        PromptTooLongError: a window does not fit into the context.
        ModelFileError: a file is not a model that can run.
    """
    runners = {ar: [OnnxRunner(path) for path in paths] for ar, paths in chains.items()}
    with HostLoop(runners, config) as loop:
        losses = [loop.losses(window) for window in windows]
    return math.exp(float(np.concatenate(losses).mean()))
