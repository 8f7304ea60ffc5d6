"""The edits that put QuantizeLinear and DequantizeLinear into a graph."""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from buildlib.errors import EncodingsError
from buildlib.graph.files import tensor_array
from buildlib.quantize.grid import Grid
from buildlib.quantize.layout import LAYOUT_OPS, is_parameter, is_real, moved_inputs, source_of
from buildlib.quantize.weight_file import WeightFile
from buildlib.quantize.weights import channel_axis


@dataclass
class QdqRewriter:
    """One graph being quantized, in place.

    Attributes:
        grids: of every float activation, by name.
        converted: what has been made, by what of and on which grid, so that it is made once.
    """

    graph: ir.Graph
    grids: dict[str, Grid]
    weights: WeightFile
    converted: dict[tuple[str, Grid], ir.Value] = field(default_factory=dict)

    def quantize_parameters(self, grids: dict[str, Grid]) -> None:
        """Replace every float initializer by its integers.

        Raises:
            EncodingsError: one has no grid, or a grid of another number of channels.
        """
        for node in list(self.graph):
            if node.op_type in {"Cast", "DequantizeLinear", "QuantizeLinear"}:
                continue
            for index, value in enumerate(node.inputs):
                if value is None or not is_parameter(value) or not is_real(value):
                    continue
                source = source_of(value)
                name = str(source.name)
                if name not in grids:
                    raise EncodingsError(name, "the model has this weight, the file no encoding")
                axis = channel_axis(node, index) or 0
                real = self._parameter(source, grids[name], axis)
                node.replace_input_with(index, real)

    def quantize_biases(self, grids: dict[str, Grid]) -> None:
        """A bias without encodings lies on the int32 grid of its product: input by weight scale."""
        for node in list(self.graph):
            if node.op_type not in {"Gemm", "Conv"} or len(node.inputs) < 3:
                continue
            data, weight, bias = node.inputs[:3]
            if data is None or weight is None or bias is None or not is_parameter(bias):
                continue
            source = source_of(bias)
            if str(source.name) in grids:
                continue
            grid = grids.get(str(source_of(weight).name))
            if grid is None or str(data.name) not in self.grids:
                continue
            step = self.grids[str(data.name)].scale[0]
            scales = tuple(step * scale for scale in grid.scale)
            bias_grid = Grid(np.dtype(np.int32), scales, (0,) * len(scales))
            node.replace_input_with(2, self._parameter(source, bias_grid, 0))

    def quantize_activations(self) -> None:
        """Store every computed value, and take every input, on its grid."""
        nodes = list(self.graph)
        for node in nodes:
            if node.op_type in LAYOUT_OPS:
                self._requantize_inputs(node)
        for value in list(self.graph.inputs):
            if str(value.name) in self.grids:
                self._quantize_input(value)
        for node in nodes:
            for output in node.outputs:
                if str(output.name) in self.grids and node.op_type != "DequantizeLinear":
                    self._quantize_output(output, node)

    def _parameter(self, source: ir.Value, grid: Grid, axis: int) -> ir.Value:
        """The dequantized value of an initializer, made once for each grid."""
        key = (str(source.name), grid)
        if key in self.converted:
            return self.converted[key]
        assert source.const_value is not None  # noqa: S101  (an initializer)
        values = tensor_array(source.const_value)
        if grid.per_channel and (values.ndim == 0 or values.shape[axis] != len(grid.scale)):
            reason = f"{len(grid.scale)} channels for a weight of shape {list(values.shape)}"
            raise EncodingsError(str(source.name), reason)
        name = f"{source.name}_q"
        stored = self._initializer(name, self.weights.add(name, grid.quantize(values, axis)))
        real = self._dequantize(stored, grid, f"{source.name}_dq", axis)
        first = next(iter(self.graph))
        producer = real.producer()
        assert producer is not None  # noqa: S101  (just made)
        self.graph.insert_before(first, producer)
        self.converted[key] = real
        return real

    def _requantize_inputs(self, node: ir.Node) -> None:
        """Put the conversion before an operator that moves values from one grid to another."""
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
                stored = self._quantize(value, target, name)
                real = self._dequantize(stored, target, f"{name}_dq")
                self.graph.insert_before(node, [_maker(stored), _maker(real)])
                self.converted[key] = real
            node.replace_input_with(index, self.converted[key])

    def _quantize_input(self, value: ir.Value) -> None:
        grid = self.grids[str(value.name)]
        uses = list(value.uses())
        value.dtype = ir.DataType.from_numpy(grid.dtype)
        real = self._dequantize(value, grid, f"{value.name}_dq")
        for use in uses:
            use.node.replace_input_with(use.idx, real)
        self.graph.insert_before(next(iter(self.graph)), _maker(real))

    def _quantize_output(self, value: ir.Value, node: ir.Node) -> None:
        name = str(value.name)
        grid = self.grids[name]
        uses = list(value.uses())
        value.name = f"{name}_real"
        stored = self._quantize(value, grid, name)
        made = [_maker(stored)]
        if uses:
            real = self._dequantize(stored, grid, f"{name}_dq")
            made.append(_maker(real))
            for use in uses:
                use.node.replace_input_with(use.idx, real)
        for index, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[index] = stored
        self.graph.insert_after(node, made)

    def _quantize(self, value: ir.Value, grid: Grid, name: str) -> ir.Value:
        dtype = ir.DataType.from_numpy(grid.dtype)
        output = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
        inputs = [value, *self._grid_values(grid)]
        ir.node("QuantizeLinear", inputs, outputs=[output], name=f"{name}_quantize")
        return output

    def _dequantize(self, value: ir.Value, grid: Grid, name: str, axis: int = 0) -> ir.Value:
        output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
        inputs = [value, *self._grid_values(grid)]
        attributes = {"axis": axis} if grid.per_channel else {}
        ir.node("DequantizeLinear", inputs, attributes, outputs=[output], name=name)
        return output

    def _grid_values(self, grid: Grid) -> list[ir.Value]:
        """Scale and zero point as initializers, shared by all who use the same grid."""
        key = ("", grid)
        if key not in self.converted:
            shape = () if not grid.per_channel else (-1,)
            number = len(self.converted)
            scale = np.array(grid.scale, np.float32).reshape(shape)
            zero = np.array(grid.zero_point, grid.dtype).reshape(shape)
            scale_name, zero_name = f"grid_{number}_scale", f"grid_{number}_zero_point"
            self.converted[key] = self._initializer(scale_name, ir.tensor(scale, name=scale_name))
            self._initializer(zero_name, ir.tensor(zero, name=zero_name))
        scale_value = self.converted[key]
        zero_name = str(scale_value.name).removesuffix("scale") + "zero_point"
        return [scale_value, self.graph.initializers[zero_name]]

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value


def _maker(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None  # noqa: S101  (made by a node of this pass)
    return node
