"""Conversions between activations of 8 and 16 bits.

The operators of QNN HTP take activations of one width (its FullyConnected of 8 and 16 bits fails to
compile with error 1002). An operator computes with 16 bits if one of its activations has them;
those of 8 bits are converted before it, and results of 8 bits after it, each on the same range. The
QNN provider of ONNX Runtime makes each pair of DequantizeLinear and QuantizeLinear that stands
between two operators a Convert (onnxruntime pull requests 19511 and 22205).
"""

from collections.abc import Mapping

import onnx_ir as ir

from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding, asymmetric_encoding
from buildlib.graph.values import is_parameter, is_real, source_of
from buildlib.quantize.structure import LAYOUT_OPS

_WIDE = 16
_NARROW = 8
_FLOAT = ir.DataType.FLOAT
_MATRICES = {"Gemm", "MatMul", "Conv"}


def convert_widths(graph: ir.Graph, encodings: dict[str, Encoding], grids: dict[str, Grid]) -> None:
    """Insert an Identity, in place, where a value changes to a grid of other bits.

    Args:
        graph: float graph.
        encodings: by name; small constants of operators that compute with 16 bits get 16.
        grids: of activations; converted values are added.
    """
    converted: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.op_type in LAYOUT_OPS or not _is_wide(node, grids):
            continue
        for index, value in enumerate(node.inputs):
            if value is None or not is_real(value) or (node.op_type == "MatMul" and index == 1):
                continue  # of keys and values, which have 8 bits
            name = str(value.name)
            if is_parameter(value):
                source = str(source_of(value).name)
                if _is_narrow_constant(encodings.get(source)) and node.op_type not in _MATRICES:
                    encodings[source] = _widened_encoding(encodings[source])
                continue
            if name in grids and grids[name].bits == _NARROW:
                if name not in converted:
                    converted[name] = _convert(graph, node, value, grids)
                node.replace_input_with(index, converted[name])
        for output in node.outputs:
            name = str(output.name)
            if name in grids and grids[name].bits == _NARROW:
                _convert_output(graph, node, output, grids)


def _is_wide(node: ir.Node, grids: Mapping[str, Grid]) -> bool:
    names = [str(v.name) for v in (*node.inputs, *node.outputs) if v is not None]
    bits = {grids[name].bits for name in names if name in grids}
    return bits == {_NARROW, _WIDE}


def _is_narrow_constant(encoding: Encoding | None) -> bool:
    return encoding is not None and (encoding.dtype, encoding.enc_type, encoding.bw) == (
        "INT", "PER_TENSOR", _NARROW,
    )  # fmt: skip


def _widened_encoding(encoding: Encoding) -> Encoding:
    low, high = _range(activation_grid(encoding))
    return asymmetric_encoding(encoding.name, low, high, _WIDE)


def _range(grid: Grid) -> tuple[float, float]:
    low, high = ((limit - grid.zero_point[0]) * grid.scale[0] for limit in grid.limits)
    return low, high


def _wide_grid(name: str, grid: Grid) -> Grid:
    return activation_grid(asymmetric_encoding(name, *_range(grid), _WIDE))


def _convert(graph: ir.Graph, node: ir.Node, value: ir.Value, grids: dict[str, Grid]) -> ir.Value:
    name = f"{value.name}_as_uint16"
    output = ir.Value(name=name, type=ir.TensorType(_FLOAT), shape=value.shape)
    graph.insert_before(node, ir.node("Identity", [value], outputs=[output], name=name))
    grids[name] = _wide_grid(name, grids[str(value.name)])
    return output


def _convert_output(
    graph: ir.Graph, node: ir.Node, value: ir.Value, grids: dict[str, Grid]
) -> None:
    name = str(value.name)
    wide = f"{name}_wide"
    output = ir.Value(name=name, type=ir.TensorType(_FLOAT), shape=value.shape)
    value.replace_all_uses_with(output, replace_graph_outputs=True)
    value.name = wide
    graph.insert_after(
        node, ir.node("Identity", [value], outputs=[output], name=f"{name}_as_uint8")
    )
    grids[wide] = _wide_grid(wide, grids[name])
