"""Ranges of activations, seen by running the float model on text.

What is filled in from them has the bits that are asked for, by default W8A16 with 8-bit caches.
Weights of matrices are int8 or int4, symmetric, a scale for each output channel or LPBQ; those of
the output projection always int8; embeddings, norms and other constants have the bits of
activations, uint16 or uint8; keys and values are uint8 symmetric around 128.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.model import Encodings
from buildlib.errors import CalibrationError, ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.quantize.ranges import Ranges, instrument
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner

if TYPE_CHECKING:
    from buildlib.quantize.complete import Bitwidths


def calibrate(
    model_path: Path,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]],
    bitwidths: "Bitwidths | None" = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Encodings:
    """Encodings for the float model at `model_path`, valid at every (AR, CL) of it.

    Args:
        model_path: at a prefill shape, so that few calls cover a window.
        config: of the model.
        token_windows: each at most the context length; only whole calls of AR tokens count.
        bitwidths: of everything; by default W8A16.
        progress: told (windows done, windows in all).

    Raises:
        CalibrationError: no window holds a whole call, or a token lies outside the vocabulary.
        InvalidOptionError: bits that a weight cannot have.
    """
    from buildlib.quantize.complete import complete_encodings

    none = Encodings(activation_encodings=(), param_encodings=())
    if not token_windows:
        raise CalibrationError("there is no text")
    return complete_encodings(model_path, none, config, token_windows, bitwidths, progress=progress)


def observe_ranges(
    model_path: Path,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
) -> Ranges:
    """The range of every activation of a whole model over windows of text.

    The windows go through the model call by call with its real caches, as prefill does. Decoding
    would show the same values at the same positions, so it adds nothing.

    Raises:
        CalibrationError: no window holds a whole call, or a token lies outside the vocabulary.
        ModelFileError: the model tells no AR and CL.
    """
    shape = interface.model_shape(load_model(model_path))
    if shape is None:
        raise ModelFileError(model_path, "it has no attention mask to tell AR and CL from")
    windows = [list(window[: len(window) // shape.ar * shape.ar]) for window in token_windows]
    windows = [window for window in windows if window]
    if not windows:
        raise CalibrationError(f"no text of at least {shape.ar} tokens")
    if any(not 0 <= token < config.vocab_size for window in windows for token in window):
        raise CalibrationError(f"a token lies outside the vocabulary of {config.vocab_size}")
    ranges = Ranges()
    with tempfile.TemporaryDirectory(dir=model_path.parent, prefix=".calibrate.") as folder:
        probed = instrument(model_path, Path(folder) / "model.onnx")
        chain = {shape.ar: [OnnxRunner(probed)]}
        with HostLoop(chain, config, on_outputs=ranges.observe) as loop:
            for index, window in enumerate(windows):
                loop.reset()
                loop.feed(window)
                if progress is not None:
                    progress(index + 1, len(windows))
    return ranges
