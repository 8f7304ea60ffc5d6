"""Calibration: the smallest and largest value of every activation.

Text runs through a copy of the float model with a ReduceMin and a ReduceMax on each activation, so
a call returns two numbers for each and no activation leaves the runtime, however large the model.
Ranges of fixed inputs and of bounded functions need no text.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import Grid
from buildlib.errors import CalibrationError
from buildlib.graph import interface
from buildlib.graph.files import load_model, save_model
from buildlib.graph.values import is_parameter, is_real
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import Arrays, OnnxRunner

_LOW, _HIGH = "__low", "__high"
Range = tuple[float, float]
_INPUTS: dict[str, Range] = {
    interface.ATTENTION_MASK: (interface.MASKED, 0.0),
    interface.COS: (-1.0, 1.0),
    interface.SIN: (-1.0, 1.0),
}

_FUNCTIONS: dict[str, Range] = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0)}
_ROTATIONS = {interface.COS, interface.SIN}


@dataclass
class RangeObserver:
    """The smallest and largest value of each activation over all observed calls."""

    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)

    def observe(self, outputs: Arrays, n_tokens: int) -> None:
        """Take in the outputs of one call of an instrumented model."""
        del n_tokens
        for name, array in outputs.items():
            if name.endswith(_LOW):
                key = name.removesuffix(_LOW)
                self.low[key] = min(self.low.get(key, np.inf), float(array))
            elif name.endswith(_HIGH):
                key = name.removesuffix(_HIGH)
                self.high[key] = max(self.high.get(key, -np.inf), float(array))

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return (smallest, largest) by name."""
        return {name: (low, self.high[name]) for name, low in self.low.items()}


def instrument_ranges(model_path: Path, out_path: Path) -> Path:
    """Write the model with the range of every activation as additional outputs."""
    model = load_model(model_path)
    graph = model.graph
    values = [value for node in graph for value in node.outputs]
    for value in values:
        if not is_real(value) or is_parameter(value):
            continue
        for op_type, suffix in (("ReduceMin", _LOW), ("ReduceMax", _HIGH)):
            output = ir.Value(
                name=f"{value.name}{suffix}",
                type=ir.TensorType(ir.DataType.FLOAT),
                shape=ir.Shape(()),
            )
            node = ir.node(op_type, [value], attributes={"keepdims": 0}, outputs=[output])
            graph.append(node)
            graph.outputs.append(output)
    return save_model(model, out_path)


def fixed_ranges(graph: ir.Graph) -> dict[str, Range]:
    """Return the ranges, by name, of inputs that Genie feeds and of values of bounded functions."""
    found = {str(v.name): _INPUTS[str(v.name)] for v in graph.inputs if str(v.name) in _INPUTS}
    for node in graph:
        if node.op_type in _FUNCTIONS:
            found[str(node.outputs[0].name)] = _FUNCTIONS[node.op_type]
    return found


def rotated_ranges(graph: ir.Graph, grids: Mapping[str, Grid]) -> dict[str, Range]:
    """Return the ranges, by name, of rotary embeddings of values on known grids.

    Rotations keep lengths: a product with a cosine is no larger than its other factor, and the sum
    of two such products is at most sqrt(2) times larger.
    """
    products: dict[str, float] = {}
    sums: dict[str, float] = {}
    for node in graph:
        names = [str(value.name) for value in node.inputs if value is not None]
        output = str(node.outputs[0].name)
        if node.op_type == "Mul" and _ROTATIONS & set(names):
            data = next((name for name in names if name not in _ROTATIONS), None)
            if data is not None and data in grids:
                products[output] = _magnitude(grids[data])
        elif node.op_type in {"Add", "Sub"} and names and all(name in products for name in names):
            sums[output] = math.sqrt(2.0) * max(products[name] for name in names)
    return {name: (-largest, largest) for name, largest in (products | sums).items()}


def _magnitude(grid: Grid) -> float:
    ends = [(limit - grid.zero_point[0]) * grid.scale[0] for limit in grid.limits]
    return max(abs(end) for end in ends)


def observe_ranges(
    model_path: Path,
    config: DecoderConfig,
    token_windows: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
) -> RangeObserver:
    """Run text through a whole model and return the observed ranges of its activations.

    The windows go through the model call by call with its real caches, as prefill does. Decoding
    would show the same values at the same positions.

    Raises:
        CalibrationError: no window holds a whole call, or a token lies outside the vocabulary.
        ModelFileError: the model tells no AR and CL.
    """
    shape = interface.require_shape(model_path)
    windows = [list(window[: len(window) // shape.ar * shape.ar]) for window in token_windows]
    windows = [window for window in windows if window]
    if not windows:
        raise CalibrationError(f"no text of at least {shape.ar} tokens")
    if any(not 0 <= token < config.vocab_size for window in windows for token in window):
        raise CalibrationError(f"a token lies outside the vocabulary of {config.vocab_size}")
    ranges = RangeObserver()
    with tempfile.TemporaryDirectory(dir=model_path.parent, prefix=".calibrate.") as folder:
        probed = instrument_ranges(model_path, Path(folder) / "model.onnx")
        chain = {shape.ar: [OnnxRunner(probed)]}
        with HostLoop(chain, config, on_outputs=ranges.observe) as loop:
            for index, window in enumerate(windows):
                loop.reset()
                loop.feed(window)
                if progress is not None:
                    progress(index + 1, len(windows))
    return ranges
