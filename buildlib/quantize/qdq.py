"""QDQ models: their inputs and outputs are the integers that Genie feeds.

Each activation `t` becomes `t_real` -> QuantizeLinear -> `t` -> DequantizeLinear -> `t_dq`, so the
integers carry the name that the float value had. Weights become integers in a file beside the
model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.files import load_encodings
from buildlib.encodings.grid import Grid
from buildlib.encodings.model import Encodings
from buildlib.graph.files import load_model
from buildlib.graph.values import is_real, remove_unused, static_shape
from buildlib.passes.base import ENCODINGS_SUFFIX, FLOAT, SORTED, STATIC, Condition, Pass
from buildlib.quantize.grids import (
    LAYOUT_OPS,
    ParameterUse,
    activation_grids,
    missing_encodings_error,
    moved_inputs,
    parameter_uses,
)
from buildlib.quantize.htp_operands import (
    convert_operands,
    convert_widths,
    rewrite_block_gemms,
)
from buildlib.quantize.weight_file import SharedWeights, WeightFile, WeightStore

_OPSET = 21  # the first with 16-bit QuantizeLinear in the standard domain
_FLOAT = ir.DataType.FLOAT
Uses = Sequence[tuple[ir.Node, int]]
"""Nodes, and their inputs that are a certain value."""


def apply_encodings(
    model_path: Path, encodings: Encodings, out_path: Path, weights: Path | None = None
) -> Path:
    """Write a float model, or part of one, as QDQ.

    Args:
        weights: file written by `quantize_weights`, linked beside the model; without it the
            weights go to `{out stem}.weights`.

    Raises:
        EncodingsError: encodings are missing, contradict each other or the model, cannot be built,
            or are not those that `weights` was made with.
        ModelFileError: `weights` is not whole; or the model is quantized already, or float values
            would remain.
    """
    if weights is not None:
        return QdqPass(encodings, SharedWeights(weights)).run(model_path, out_path)
    with WeightFile(out_path.with_suffix(".weights")) as file:
        return QdqPass(encodings, file, file.finish).run(model_path, out_path)


def quantize_weights(model_path: Path, file: Path, encodings: Encodings | None = None) -> Path:
    """Write the integer weights of a part, for `apply_encodings` at every (AR, CL) of it.

    Args:
        model_path: the float part, at any (AR, CL).
        file: destination; its index stands beside it.
        encodings: encodings of the part; by default from the file beside it.
    """
    if encodings is None:
        encodings = load_encodings(model_path.with_suffix(ENCODINGS_SUFFIX))
    model = load_model(model_path)
    with WeightFile(file) as weights:
        QdqPass(encodings, weights, lambda: weights.finish(index=True)).transform(model)
    return file


class QdqPass(Pass):
    """Pass that puts every float value of a model on the grid of its encoding.

    Args:
        weights: source or destination of the integer weights.
        finish: called after all weights, before the model is written.
    """

    name = "qdq"
    carries_encodings = False  # they become part of the graph

    def __init__(
        self,
        encodings: Encodings,
        weights: WeightStore,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        opset = Condition(f"its opset is {_OPSET} or later", _too_old)
        has_integers = Condition("every value computed is stored as integers", _still_real)
        self.requires = (SORTED, STATIC, FLOAT, opset)
        self.ensures = (SORTED, STATIC, has_integers)
        self.encodings = encodings.by_name()
        self.weights = weights
        self.finish = finish

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        encodings = dict(self.encodings)
        grids = activation_grids(model.graph, encodings)
        transposed = rewrite_block_gemms(model.graph, encodings, grids)
        convert_widths(model.graph, encodings, grids)
        convert_operands(model.graph, grids)
        uses = parameter_uses(model.graph, encodings, grids, transposed)
        rewriter = QdqRewriter(model.graph, grids, self.weights)
        rewriter.quantize_parameters(uses)
        rewriter.quantize_activations()
        remove_unused(model.graph)
        self.finish()
        return model


def _too_old(model: ir.Model) -> str | None:
    opset = model.graph.opset_imports.get("", 0)
    return None if opset >= _OPSET else f"it is {opset}"


def _still_real(model: ir.Model) -> str | None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if is_real(value):
            return f"{value.name} is {value.dtype}"
    for node in model.graph:
        for value in node.outputs:
            if not is_real(value) or node.op_type == "DequantizeLinear":
                continue
            if any(use.node.op_type != "QuantizeLinear" for use in value.uses()):
                return f"{value.name} is used as {value.dtype}"
    return None


@dataclass
class QdqRewriter:
    """Puts QuantizeLinear and DequantizeLinear into a graph, in place.

    Attributes:
        grids: grid of every float activation, by name.
        converted: values made so far, by source and grid, so that each is made once.
    """

    graph: ir.Graph
    grids: dict[str, Grid]
    weights: WeightStore
    converted: dict[tuple[str, Grid], ir.Value] = field(default_factory=dict)
    _grid_initializers: dict[Grid, list[ir.Value]] = field(default_factory=dict)
    _shared: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = field(default_factory=dict)

    def quantize_parameters(self, uses: list[ParameterUse]) -> None:
        """Replace every float constant by its integers."""
        names = sorted({use.name for use in uses if use.grid is None})
        if names:
            raise missing_encodings_error(names)
        for use in uses:
            if use.grid is not None:
                use.node.replace_input_with(use.index, self._parameter(use, use.grid))

    def quantize_activations(self) -> None:
        """Store every computed value and every input on its grid."""
        values = list(self._activations())
        for node in list(self.graph):
            if node.op_type in LAYOUT_OPS:
                self._requantize_inputs(node)
        for value, name, grid in values:
            uses, new = tuple(value.uses()), []
            if value.producer() is None:
                value.dtype = ir.DataType.from_numpy(grid.dtype)
                integers = value
            else:
                value.name = f"{name}_real"
                integers = self._quantize(value, grid, name)
                self._replace_output(value, integers)
                new = [integers]
            if uses:
                new.append(self._dequantize(integers, grid, f"{name}_dq"))
            self._insert_after(value, uses, new)

    def round_activations(self) -> None:
        """Round every value that has a grid to it, and keep it in float32 by its own name."""
        for value, name, grid in list(self._activations()):
            uses, real_name = tuple(value.uses()), f"{name}_dq"
            if value.producer() is not None:
                value.name, real_name = f"{name}_real", name
            integers = self._quantize(value, grid, f"{name}_q")
            real = self._dequantize(integers, grid, real_name)
            _producer(real).name = f"{name}_round"  # a node may have the value's name
            self._replace_output(value, real)
            self._insert_after(value, uses, [integers, real])

    def _activations(self) -> Iterator[tuple[ir.Value, str, Grid]]:
        """Yield inputs and computed values that have a grid, each with its name and its grid."""
        nodes = (node for node in self.graph if node.op_type != "DequantizeLinear")
        for value in (*self.graph.inputs, *(output for node in nodes for output in node.outputs)):
            name = str(value.name)
            if name in self.grids:
                yield value, name, self.grids[name]

    def _insert_after(self, value: ir.Value, uses: Uses, new: Sequence[ir.Value]) -> None:
        """Insert the makers of new values after a value; its users read the last of them."""
        for node, index in uses:
            node.replace_input_with(index, new[-1])
        nodes = [_producer(one) for one in new]
        if (producer := value.producer()) is None:
            self.graph.insert_before(next(iter(self.graph)), nodes)
        else:
            self.graph.insert_after(producer, nodes)

    def _replace_output(self, value: ir.Value, new: ir.Value) -> None:
        for index, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[index] = new

    def _parameter(self, use: ParameterUse, grid: Grid) -> ir.Value:
        """Return the dequantized value of an initializer, made once for each grid."""
        name, tensor = use.name, use.source.const_value
        key = (f"{name} transposed" if use.transposed else name, grid)
        if key in self.converted:
            return self.converted[key]
        assert tensor is not None  # noqa: S101  (an initializer)
        axis = 1 - use.axis if use.transposed else use.axis
        label = name
        if f"{name}_q" in self.graph.initializers:  # on another grid
            label = f"{name}_{len(self.converted)}"
        tensor_q = self.weights.weight(name, tensor, grid, axis, transposed=use.transposed)
        integers = self._initializer(f"{label}_q", tensor_q)
        if grid.block_size is None:
            real = self._dequantize(integers, grid, f"{label}_dq", axis)
        else:
            shape = static_shape(integers) or ()
            factors = np.frombuffer(grid.block_scale, np.uint8).reshape(shape[axis], -1)
            laid = np.ascontiguousarray(factors if axis == 0 else factors.T)
            scales = self.weights.block_scale(name, laid, grid)
            real = self._dequantize_blocks(integers, scales, grid, label, axis)
        makers = [
            value.producer() for value in (*_producer(real).inputs, real) if value is not None
        ]
        first = next(iter(self.graph))
        self.graph.insert_before(first, [maker for maker in makers if maker is not None])
        self.converted[key] = real
        return real

    def _dequantize_blocks(
        self, stored: ir.Value, scales: ir.TensorProtocol, grid: Grid, label: str, axis: int
    ) -> ir.Value:
        """Write the pattern by which the QNN provider recognises LPBQ."""
        # The integer scales of the blocks, dequantized along the channels, are the scale of the
        # weight, and its blocks lie along its input axis.
        integers = self._initializer(f"{label}_block_scale", scales)
        channels = Grid(np.dtype(np.uint8), grid.scale, (0,) * len(grid.scale))
        scale = self._dequantize(integers, channels, f"{label}_scale", axis)
        zeros = ir.Tensor(np.zeros(scales.shape.numpy(), grid.dtype), name=f"{label}_zero_point")
        zero = self._initializer(f"{label}_zero_point", zeros)
        output = ir.val(f"{label}_dq", _FLOAT, stored.shape)
        attributes = {"axis": 1 - axis, "block_size": grid.block_size or 1}
        inputs = [stored, scale, zero]
        ir.node("DequantizeLinear", inputs, attributes, outputs=[output], name=f"{label}_dq")
        return output

    def _requantize_inputs(self, node: ir.Node) -> None:
        """Insert a conversion before a layout operator that moves values between two grids."""
        target = self.grids.get(str(node.outputs[0].name))
        if target is None:
            return
        for index, value in enumerate(node.inputs):
            if value is None or value not in moved_inputs(node):
                continue
            source = self.grids.get(str(value.name))
            if source is None or source == target:
                continue
            key = (str(value.name), target)
            if key not in self.converted:
                name = f"{value.name}_as_{target.dtype}_for_{node.outputs[0].name}"
                integers = self._quantize(value, target, name)
                real = self._dequantize(integers, target, f"{name}_dq")
                self.graph.insert_before(node, [_producer(integers), _producer(real)])
                self.converted[key] = real
            node.replace_input_with(index, self.converted[key])

    def _quantize(self, value: ir.Value, grid: Grid, name: str) -> ir.Value:
        output = ir.val(name, ir.DataType.from_numpy(grid.dtype), value.shape)
        inputs = [value, *self._grid_values(grid)]
        ir.node("QuantizeLinear", inputs, outputs=[output], name=f"{name}_quantize")
        return output

    def _dequantize(self, value: ir.Value, grid: Grid, name: str, axis: int = 0) -> ir.Value:
        output = ir.val(name, _FLOAT, value.shape)
        inputs = [value, *self._grid_values(grid)]
        attributes = {"axis": axis} if grid.per_channel else {}
        ir.node("DequantizeLinear", inputs, attributes, outputs=[output], name=name)
        return output

    def _grid_values(self, grid: Grid) -> list[ir.Value]:
        """Return scale and zero point as initializers, each of which stands once in the graph.

        For each input of each node the QNN provider looks through the names of all initializers,
        and copies those of more than 15 characters: conversions of a model of 24 layers took 14.8 s
        with a zero point for each grid, 10.5 s without, and 9.0 s with short names.
        """
        if grid not in self._grid_initializers:
            shape = () if not grid.per_channel else (-1,)
            scale = np.array(grid.scale, np.float32).reshape(shape)
            zero = np.array(grid.zero_point).astype(grid.dtype).reshape(shape)
            self._grid_initializers[grid] = [
                self._shared_initializer("scale", scale),
                self._shared_initializer("zero_point", zero),
            ]
        return self._grid_initializers[grid]

    def _shared_initializer(self, kind: str, array: npt.NDArray[Any]) -> ir.Value:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            name = f"{kind}_{len(self._shared)}"
            self._shared[key] = self._initializer(name, ir.Tensor(array, name=name))
        return self._shared[key]

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.val(name, const_value=tensor)
        self.graph.register_initializer(value)
        return value


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None  # noqa: S101  (made by a node of this pass)
    return node
