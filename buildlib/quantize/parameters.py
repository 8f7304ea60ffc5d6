"""Which grid every constant of a graph lies on, for each use of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from buildlib.encodings.grid import ACTIVATION_BITS, Grid, weight_grid
from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError
from buildlib.graph.infer import static_shape
from buildlib.graph.values import is_parameter, is_real, source_of
from buildlib.quantize.layout import moved_inputs
from buildlib.quantize.weights import channel_axis

INPUT_STEP = 32
"""Must divide the inputs of a weight in blocks."""

_BIASED = {"Gemm", "Conv"}
_SKIPPED = {"Cast", "DequantizeLinear", "QuantizeLinear"}


@dataclass(frozen=True)
class ParameterUse:
    """Input `index` of `node`, which is the constant `source`, or a cast of it.

    Attributes:
        grid: None where the encodings say nothing of it.
        axis: of its channels.
        transposed: whether the node takes it with its two axes exchanged.
    """

    node: ir.Node
    index: int
    source: ir.Value
    grid: Grid | None
    axis: int
    transposed: bool = False

    @property
    def name(self) -> str:
        """Of the constant."""
        return str(self.source.name)


def parameter_uses(
    graph: ir.Graph,
    encodings: Mapping[str, Encoding],
    activations: Mapping[str, Grid],
    transposed: Collection[ir.Node] = (),
) -> list[ParameterUse]:
    """All uses of float constants, with their grids.

    A bias lies on the int32 grid of the product that it is added to (the scale of the input times
    that of each channel's weights) whatever its encoding says: the QNN provider takes no other.

    Args:
        graph: of a float model.
        encodings: by name.
        activations: grids of the values that are computed or fed.
        transposed: nodes whose weight is the transpose of what they need.

    Raises:
        EncodingsError: an encoding cannot be built, or lies along another axis than the operator's.
    """
    grids: dict[str, Grid] = {}

    def grid_of(name: str) -> Grid | None:
        if name not in grids and name in encodings:
            if encodings[name].dtype != "INT":
                return None
            grids[name] = weight_grid(encodings[name])
        return grids.get(name)

    found: list[ParameterUse] = []
    axes: dict[str, int] = {}
    for node in graph:
        if node.op_type in _SKIPPED:
            continue
        for index, value in enumerate(node.inputs):
            if value is None or not is_parameter(value) or not is_real(value):
                continue
            source = source_of(value)
            encoding = encodings.get(str(source.name))
            turned = index == 1 and node in transposed
            axis = _axis(node, 0 if turned else channel_axis(node, index), encoding)
            if is_bias(node, index):
                weight = node.inputs[1]
                weights = None if weight is None else grid_of(str(source_of(weight).name))
                grid = _product_grid(node, weights, activations)
            else:
                grid = _lookup_grid(node, value, grid_of(str(source.name)), activations)
            _check_blocks(grid, source, axis)
            if grid is not None and grid.per_channel:
                _check_axis(axes.setdefault(str(source.name), axis), axis, str(source.name))
            found.append(ParameterUse(node, index, source, grid, axis, turned))
    return found


def is_bias(node: ir.Node, index: int) -> bool:
    """Whether input `index` is added to a product of the node."""
    return index == 2 and node.op_type in _BIASED


def _axis(node: ir.Node, own: int | None, encoding: Encoding | None) -> int:
    given = encoding.axis if encoding is not None else None
    if own is None:
        return given or 0
    if encoding is not None and given is not None and given != own and len(encoding.scale) > 1:
        reason = f"channels along axis {given}, where {node.op_type} has them along {own}"
        raise EncodingsError(encoding.name, reason)
    return own


def _check_blocks(grid: Grid | None, source: ir.Value, axis: int) -> None:
    """HTP computes wrong numbers with LPBQ unless 32 divides the inputs (seen with QNN 2.51)."""
    shape = static_shape(source)
    if grid is None or grid.block_size is None or shape is None:
        return
    if len(shape) != 2 or shape[1 - axis] % INPUT_STEP:
        reason = f"LPBQ of a weight of shape {list(shape)}: {INPUT_STEP} must divide the inputs"
        raise EncodingsError(str(source.name), reason)


def _check_axis(first: int, axis: int, name: str) -> None:
    if first != axis:
        reason = f"one use of it has channels along axis {first}, another along {axis}"
        raise EncodingsError(name, reason)


def _lookup_grid(
    node: ir.Node, value: ir.Value, grid: Grid | None, activations: Mapping[str, Grid]
) -> Grid | None:
    """A table with channels, or of few bits, as that of tied embeddings: looked up on other grids.

    QNN looks nothing up in such a table. It takes one on the grid of what is looked up.
    """
    if grid is None or value not in moved_inputs(node):
        return grid
    plain = not grid.per_channel and grid.bits in ACTIVATION_BITS
    return grid if plain else activations.get(str(node.outputs[0].name))


def _product_grid(
    node: ir.Node, weights: Grid | None, activations: Mapping[str, Grid]
) -> Grid | None:
    data, weight = node.inputs[0], node.inputs[1]
    if data is None or weight is None or weights is None:
        return None
    step = activations.get(str(data.name))
    if step is None:
        return None
    product = tuple(step.scale[0] * scale for scale in weights.scale)
    return Grid(np.dtype(np.int32), product, (0,) * len(product))
