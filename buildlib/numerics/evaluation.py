"""Evaluation of a model on text beside the model in float: perplexity, KL divergence, top-1.

The same function takes the model of any stage: float ONNX, QDQ on the CPU, compiled graphs on the
emulator. The float model runs once; its logits stay in a temporary file, and memory holds those of
one call.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.errors import BuildError
from buildlib.numerics.divergence import Divergence, DivergenceSums, Logits
from buildlib.numerics.host_loop import HostLoop, TokenModel, feed_window, open_onnx, window_losses
from buildlib.numerics.runners import Arrays, OnnxRunner

_ROWS = 64


class FloatLogits(Closeable):
    """Logits of the model in float over windows of text, kept in a temporary file.

    The file has positions x vocabulary x 4 bytes, and goes when this is closed.

    Args:
        windows: token ids without bos. All of them are predicted; where no bos stands before
            texts, all but the first of each.
        folder: place of the file; by default the system's for temporary files.

    Attributes:
        inputs: the tokens to feed for each window: bos if texts begin with one, and all but the
            last.

    Raises:
        BuildError: there are no tokens, or one lies outside the vocabulary.
    """

    def __init__(
        self,
        windows: Sequence[Sequence[int]],
        config: DecoderConfig,
        folder: Path | None = None,
    ) -> None:
        whole = [(*config.begin, *window) for window in windows]
        self.inputs = tuple(window[:-1] for window in whole if len(window) > 1)
        self._following = np.array([token for window in whole for token in window[1:]], np.int64)
        if not self._following.size:
            raise BuildError("there is no text to evaluate the model on")
        if not 0 <= self._following.min() <= self._following.max() < config.vocab_size:
            raise BuildError(f"a token lies outside the vocabulary of {config.vocab_size}")
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        shape = (self._following.size, config.vocab_size)
        self._logits = np.memmap(self._file, np.float32, "w+", shape=shape)
        self._recorded = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def restart(self) -> None:
        """Record from the first position again."""
        self._recorded = 0

    def record(self, logits: Logits) -> None:
        """Keep the logits of the model in float at the next positions."""
        end = self._recorded + len(logits)
        self._logits[self._recorded : end] = logits
        self._recorded = end

    def own(self) -> Divergence:
        """Return the evaluation of the model in float itself."""
        sums = DivergenceSums()
        while sums.steps < self._recorded:
            end = min(sums.steps + _ROWS, self._recorded)
            self.compare(np.asarray(self._logits[sums.steps : end]), sums)
        return sums.mean()

    def compare(self, logits: Logits, sums: DivergenceSums) -> None:
        """Add a model's logits at its next positions to its sums."""
        where = slice(sums.steps, sums.steps + len(logits))
        sums.add(logits, self._logits[where], self._following[where])


def record_float(
    model_path: Path,
    config: DecoderConfig,
    windows: Sequence[Sequence[int]],
    *,
    constants: Arrays | None = None,
    n_threads: int = 0,
) -> FloatLogits:
    """Run a whole float ONNX model, and keep its logits; the caller closes them.

    Args:
        model_path: at a prefill shape, in canonical form.
        windows: token ids without bos, each shorter than the context length.
        n_threads: threads of ONNX Runtime; 0 for one per core.
    """
    reference = FloatLogits(windows, config)
    try:
        loop = open_onnx(model_path, config, constants=constants, n_threads=n_threads, plain=True)
        with loop:
            for window in reference.inputs:
                for _, logits in feed_window(loop, window):
                    reference.record(logits)
    except BaseException:
        reference.close()
        raise
    return reference


def evaluate_model(model: TokenModel, reference: FloatLogits) -> Divergence:
    """Evaluate a model of any stage over the windows of its reference.

    The result has the perplexity (`exp` of the mean negative log-likelihood of all tokens of the
    windows that `FloatLogits` has), the KL divergence in nats and the top-1 agreement, as llama.cpp
    defines them (see `Divergence`).

    Args:
        model: a `HostLoop` over `OnnxRunner`s or `emulator_chains`, or a `TransformersModel`.
        reference: of the model in float.

    Raises:
        BuildError: a window does not fit into the context; or logits that are not finite, or of
            another vocabulary.
        RunnerDiedError: the emulator failed.
    """
    sums = DivergenceSums()
    try:
        for window in reference.inputs:
            for _, logits in feed_window(model, window):
                reference.compare(logits, sums)
    except ValueError as error:
        raise BuildError(f"the model cannot be compared with float: {error}") from error
    return sums.mean()


def text_perplexity(
    model: TokenModel, config: DecoderConfig, windows: Sequence[Sequence[int]], *, context: int = 0
) -> float:
    """Return `exp` of the mean negative log-likelihood of the tokens of windows.

    Args:
        model: as `evaluate_model` takes it.
        windows: token ids without bos, each shorter than the context length: the positions that
            Genie scores on a device.
        context: tokens at the start of each window that are left out of the mean; where no bos
            stands before texts, the first is in any case.
    """
    unscored = max(0, context - 1 + len(config.begin))
    losses = [window_losses(model, config.begin, window)[unscored:] for window in windows]
    return math.exp(float(np.concatenate(losses).mean()))


def onnx_perplexity(
    chains: Mapping[int, Sequence[Path]], config: DecoderConfig, windows: Sequence[Sequence[int]]
) -> float:
    """Return the `text_perplexity` of ONNX models, float or QDQ, on ONNX Runtime's CPU provider.

    Args:
        chains: parts of the model in order, by AR.
        windows: as `text_perplexity` takes them.
    """
    runners = {ar: [OnnxRunner(path) for path in paths] for ar, paths in chains.items()}
    with HostLoop(runners, config) as loop:
        return text_perplexity(loop, config, windows)
