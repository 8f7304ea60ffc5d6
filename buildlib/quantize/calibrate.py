"""Encodings by min/max: W8A16 with 8-bit caches, calibrated by running the float model.

Weights of matrices are int8, symmetric, a scale for each output channel; embeddings, norms and
other constants uint16; activations uint16; keys and values uint8 symmetric around 128.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.config import LlamaConfig
from buildlib.encodings.model import Encoding, Encodings, covering, symmetric
from buildlib.errors import CalibrationError, ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import load_model, tensor_array
from buildlib.quantize.layout import is_parameter, is_real, shared_grids, source_of
from buildlib.quantize.ranges import Ranges, instrument
from buildlib.quantize.weights import channel_axis, per_channel
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner

_ACTIVATION_BITS = 16
_KV_BITS = 8
_WEIGHT_BITS = 8

_KNOWN_RANGES = {
    interface.ATTENTION_MASK: (interface.MASKED, 0.0),
    interface.COS: (-1.0, 1.0),
    interface.SIN: (-1.0, 1.0),
}
_KNOWN_OUTPUTS = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0)}


def calibrate(
    model_path: Path,
    config: LlamaConfig,
    token_windows: Sequence[Sequence[int]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Encodings:
    """Encodings for the float model at `model_path`, valid at every (AR, CL) of it.

    The windows go through the model call by call with its real caches, as prefill does. Decoding
    would show the same values at the same positions, so it adds nothing.

    Args:
        model_path: at a prefill shape, so that few calls cover a window.
        config: of the model.
        token_windows: each at most the context length; only whole calls of AR tokens count.
        progress: told (windows done, windows in all).

    Raises:
        CalibrationError: no window holds a whole call, or a token lies outside the vocabulary.
    """
    model = load_model(model_path)
    shape = interface.model_shape(model)
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
    return _encodings(model, ranges)


def _encodings(model: ir.Model, ranges: Ranges) -> Encodings:
    graph = model.graph
    parameters = _parameters(graph)
    _add_known(graph, parameters, ranges)
    grids = _shared_encodings(graph, ranges)
    activations = tuple(
        grids[str(value.name)]
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs))
        if is_real(value) and not is_parameter(value)
    )
    params: list[Encoding] = []
    for name, (value, axis) in parameters.items():
        if axis is not None:
            params.append(per_channel(name, _array(value), axis, _WEIGHT_BITS))
        else:
            alone = covering(name, ranges.low[name], ranges.high[name], _ACTIVATION_BITS)
            params.append(grids.get(name, alone))
    return Encodings(activation_encodings=activations, param_encodings=tuple(params))


def _add_known(
    graph: ir.Graph, parameters: dict[str, tuple[ir.Value, int | None]], ranges: Ranges
) -> None:
    """Ranges that no text needs to show: of fixed inputs, of constants, of bounded functions."""
    for value in graph.inputs:
        known = _KNOWN_RANGES.get(str(value.name))
        if known is not None:
            ranges.low[str(value.name)], ranges.high[str(value.name)] = known
    for node in graph:
        if node.op_type in _KNOWN_OUTPUTS:
            name = str(node.outputs[0].name)
            ranges.low[name], ranges.high[name] = _KNOWN_OUTPUTS[node.op_type]
    for name, (value, axis) in parameters.items():
        if axis is None:
            array = _array(value)
            ranges.low[name], ranges.high[name] = float(array.min()), float(array.max())


def _shared_encodings(graph: ir.Graph, ranges: Ranges) -> dict[str, Encoding]:
    """One grid for all values that must share it, under the name of each of them."""
    grids: dict[str, Encoding] = {}
    for names in shared_grids(graph):
        seen = [name for name in names if name in ranges.low]
        if not seen:
            continue
        low = min(ranges.low[name] for name in seen)
        high = max(ranges.high[name] for name in seen)
        for name in names:
            grids[name] = (
                symmetric(name, max(-low, high), _KV_BITS)
                if any(map(interface.is_kv, names))
                else covering(name, low, high, _ACTIVATION_BITS)
            )
    return grids


def _parameters(graph: ir.Graph) -> dict[str, tuple[ir.Value, int | None]]:
    """Every float initializer with the channel axis of the matrix it is, if it is one."""
    found: dict[str, tuple[ir.Value, int | None]] = {}
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is None or node.op_type == "Cast":
                continue
            source = source_of(value)
            if source.is_initializer() and is_real(source):
                found[str(source.name)] = (source, channel_axis(node, index))
    return found


def _array(value: ir.Value) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert value.const_value is not None  # noqa: S101  (an initializer)
    return tensor_array(value.const_value).astype(np.float32)
