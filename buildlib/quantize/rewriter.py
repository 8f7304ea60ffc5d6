"""Graph edits that put QuantizeLinear and DequantizeLinear into a model."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.grid import Grid
from buildlib.graph.values import static_shape
from buildlib.quantize.grids import ParameterUse, missing_encodings_error
from buildlib.quantize.structure import LAYOUT_OPS, moved_inputs
from buildlib.quantize.weight_file import WeightStore

SIGNAL, NOISE = "__signal", "__noise"


@dataclass
class QdqRewriter:
    """Rewrites one graph in place.

    Attributes:
        grids: grid of every float activation, by name.
        converted: values made so far, by source and grid, so that each is made once.
    """

    graph: ir.Graph
    grids: dict[str, Grid]
    weights: WeightStore
    converted: dict[tuple[str, Grid], ir.Value] = field(default_factory=dict)

    def quantize_parameters(self, uses: list[ParameterUse]) -> None:
        """Replace every float constant by its integers."""
        missing = sorted({use.name for use in uses if use.grid is None})
        if missing:
            raise missing_encodings_error(missing)
        for use in uses:
            if use.grid is not None:
                real = self._parameter(use, use.grid)
                use.node.replace_input_with(use.index, real)

    def quantize_activations(self) -> None:
        """Store every computed value and every input on its grid."""
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

    def round_activations(self) -> None:
        """Round every value that has a grid to it, and keep it in float32 by its own name."""
        nodes = list(self.graph)
        for value in list(self.graph.inputs):
            if (grid := self.grids.get(str(value.name))) is not None:
                uses = list(value.uses())
                stored = self._quantize(value, grid, f"{value.name}_q")
                real = self._dequantize(stored, grid, f"{value.name}_dq")
                for use in uses:
                    use.node.replace_input_with(use.idx, real)
                self.graph.insert_before(
                    next(iter(self.graph)), [_producer(stored), _producer(real)]
                )
        for node in nodes:
            for output in node.outputs:
                name = str(output.name)
                if (grid := self.grids.get(name)) is not None:
                    uses = list(output.uses())
                    output.name = f"{name}_real"
                    stored = self._quantize(output, grid, f"{name}_q")
                    real = self._dequantize(stored, grid, name)
                    _producer(real).name = f"{name}_round"  # a node may have the value's name
                    for use in uses:
                        use.node.replace_input_with(use.idx, real)
                    for index, value in enumerate(self.graph.outputs):
                        if value is output:
                            self.graph.outputs[index] = real
                    self.graph.insert_after(node, [_producer(stored), _producer(real)])

    def add_noise_outputs(self) -> None:
        """Add the sums of squares of every value with a grid, and of its rounding errors.

        They are outputs `{name}__signal` and `{name}__noise` for each; nothing else changes.
        """
        values = [*self.graph.inputs, *(output for node in self.graph for output in node.outputs)]
        for value in values:
            name = str(value.name)
            if (grid := self.grids.get(name)) is None:
                continue
            stored = self._quantize(value, grid, f"{name}__q")
            real = self._dequantize(stored, grid, f"{name}__dq")
            error = ir.node("Sub", [value, real])
            error.outputs[0].name = f"{name}__error"
            self.graph.extend([_producer(stored), _producer(real), error])
            for squared, suffix in ((value, SIGNAL), (error.outputs[0], NOISE)):
                output = ir.Value(
                    name=f"{name}{suffix}",
                    type=ir.TensorType(ir.DataType.FLOAT),
                    shape=ir.Shape(()),
                )
                self.graph.append(
                    ir.node("ReduceSumSquare", [squared], {"keepdims": 0}, outputs=[output])
                )
                self.graph.outputs.append(output)

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
        integers = self.weights.weight(name, tensor, grid, axis, transposed=use.transposed)
        stored = self._initializer(f"{label}_q", integers)
        if grid.block_size is None:
            real = self._dequantize(stored, grid, f"{label}_dq", axis)
        else:
            laid = block_scales(grid, static_shape(stored) or (), axis)
            scales = self.weights.block_scale(name, laid, grid)
            real = self._dequantize_blocks(stored, scales, grid, label, axis)
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
        """Write the pattern by which the QNN provider recognises LPBQ.

        The integer scales of the blocks, dequantized along the channels, are the scale of the
        weight, whose blocks lie along its input axis.
        """
        integers = self._initializer(f"{label}_block_scale", scales)
        channels = Grid(np.dtype(np.uint8), grid.scale, (0,) * len(grid.scale))
        scale = self._dequantize(integers, channels, f"{label}_scale", axis)
        zeros = ir.tensor(np.zeros(scales.shape.numpy(), grid.dtype), name=f"{label}_zero_point")
        zero = self._initializer(f"{label}_zero_point", zeros)
        real = ir.TensorType(ir.DataType.FLOAT)
        output = ir.Value(name=f"{label}_dq", type=real, shape=stored.shape)
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
                stored = self._quantize(value, target, name)
                real = self._dequantize(stored, target, f"{name}_dq")
                self.graph.insert_before(node, [_producer(stored), _producer(real)])
                self.converted[key] = real
            node.replace_input_with(index, self.converted[key])

    def _quantize_input(self, value: ir.Value) -> None:
        grid = self.grids[str(value.name)]
        uses = list(value.uses())
        value.dtype = ir.DataType.from_numpy(grid.dtype)
        real = self._dequantize(value, grid, f"{value.name}_dq")
        for use in uses:
            use.node.replace_input_with(use.idx, real)
        self.graph.insert_before(next(iter(self.graph)), _producer(real))

    def _quantize_output(self, value: ir.Value, node: ir.Node) -> None:
        name = str(value.name)
        grid = self.grids[name]
        uses = list(value.uses())
        value.name = f"{name}_real"
        stored = self._quantize(value, grid, name)
        nodes = [_producer(stored)]
        if uses:
            real = self._dequantize(stored, grid, f"{name}_dq")
            nodes.append(_producer(real))
            for use in uses:
                use.node.replace_input_with(use.idx, real)
        for index, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[index] = stored
        self.graph.insert_after(node, nodes)

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
        """Return scale and zero point as initializers, shared by all users of a grid."""
        key = ("", grid)
        if key not in self.converted:
            shape = () if not grid.per_channel else (-1,)
            number = len(self.converted)
            scale = np.array(grid.scale, np.float32).reshape(shape)
            zero = np.array(grid.zero_point).astype(grid.dtype).reshape(shape)
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


def block_scales(grid: Grid, shape: tuple[int, ...], axis: int) -> npt.NDArray[np.uint8]:
    """Return the integer scales of a weight's blocks in the layout of the weight."""
    factors = np.frombuffer(grid.block_scale, np.uint8).reshape(shape[axis], -1)
    return np.ascontiguousarray(factors if axis == 0 else factors.T)


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None  # noqa: S101  (made by a node of this pass)
    return node
