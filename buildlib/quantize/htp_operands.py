"""Rewriting of float graphs to operators that HTP computes with the bits of their encodings.

The operators of QNN HTP take activations of one width (its FullyConnected of 8 and 16 bits fails to
compile with error 1002). An operator computes with 16 bits if one of its activations has them;
those of 8 bits are converted before it, and results of 8 bits after it, each on the same range. The
QNN provider of ONNX Runtime makes each pair of DequantizeLinear and QuantizeLinear that stands
between two operators a Convert (onnxruntime pull requests 19511 and 22205).
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding, asymmetric_encoding, symmetric_encoding
from buildlib.graph.files import tensor_array
from buildlib.graph.values import WEIGHED, is_parameter, is_real, source_of
from buildlib.quantize.grids import LAYOUT_OPS
from buildlib.quantize.recipe import value_range

_WIDE = 16
_NARROW = 8


def rewrite_block_gemms(
    graph: ir.Graph, encodings: dict[str, Encoding], grids: dict[str, Grid]
) -> set[ir.Node]:
    """Replace each Gemm with weights in blocks by a MatMul, and an Add if it has a bias.

    The QNN provider fuses a MatMul with LPBQ weights of shape [in, out]. It does not fuse a Gemm,
    and compiles one with a bias to other numbers (seen with QNN 2.51).

    Args:
        graph: float graph; changed in place.
        encodings: encodings by name; biases without one of 8 or 16 bits get one.
        grids: grids of activations; new products get one.

    Returns:
        The MatMuls with a weight that is still [out, in], to be stored transposed.
    """
    transposed: set[ir.Node] = set()
    for node in list(graph):
        if node.op_type == "Gemm" and _has_block_weights(node, encodings):
            product = _gemm_to_matmul(graph, node, encodings, grids)
            if node.attributes.get_int("transB", 0):
                transposed.add(product)
    return transposed


def _has_block_weights(node: ir.Node, encodings: Mapping[str, Encoding]) -> bool:
    weight = node.inputs[1]
    encoding = None if weight is None else encodings.get(str(source_of(weight).name))
    scaled = any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
    plain = not scaled and not node.attributes.get_int("transA", 0)
    return plain and encoding is not None and encoding.block_size is not None


def _gemm_to_matmul(
    graph: ir.Graph, node: ir.Node, encodings: dict[str, Encoding], grids: dict[str, Grid]
) -> ir.Node:
    data, weight, bias = (*node.inputs, None)[:3]
    end = node.outputs[0]
    name, product = str(end.name), f"{end.name}_product"
    output = ir.val(name, shape=end.shape, type=end.type)
    sums = output if bias is None else ir.val(product, shape=end.shape, type=end.type)
    nodes = [ir.node("MatMul", [data, weight], outputs=[sums], name=f"{node.name}_product")]
    if bias is not None:
        nodes.append(ir.node("Add", [sums, bias], outputs=[output], name=f"{node.name}_bias"))
        low, high = _bias_range(bias, encodings)
        bottom, top = grids[name].ends
        encoding = asymmetric_encoding(product, bottom - high, top - low, grids[name].bits)
        grids[product] = activation_grid(encoding)  # on the grid of the sum once bias is added
    end.replace_all_uses_with(output, replace_graph_outputs=True)
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    end.name = f"{name}_replaced"
    graph.insert_before(node, nodes)
    graph.remove(node)
    return nodes[0]


def _bias_range(bias: ir.Value, encodings: dict[str, Encoding]) -> tuple[float, float]:
    source = source_of(bias)
    name = str(source.name)
    assert source.const_value is not None  # noqa: S101  (an initializer)
    low, high = value_range(name, tensor_array(source.const_value))
    encoding = encodings.get(name)
    if encoding is None or encoding.dtype != "INT" or encoding.bw > 16:
        encodings[name] = asymmetric_encoding(name, low, high, 16)
    return low, high


def convert_operands(graph: ir.Graph, grids: dict[str, Grid]) -> None:
    """Insert an Identity, in place, that makes the second operand of a product int16.

    HTP computes a product of two activations with eight bits of the second one if it is uint16, and
    with all 16 if it is int16 (seen with QNN 2.51: 9 and 50 dB over float for one large channel).

    Args:
        grids: of activations; converted values are added.
    """
    converted: dict[str, ir.Value] = {}
    for node in list(graph):
        value = node.inputs[1] if node.op_type == "MatMul" else None
        if value is None or is_parameter(value):
            continue
        grid = grids.get(str(value.name))
        if grid is None or grid.dtype != np.uint16:
            continue
        name = f"{value.name}_as_int16"
        if name not in converted:
            grids[name] = activation_grid(symmetric_encoding(name, max(map(abs, grid.ends)), _WIDE))
            converted[name] = ir.val(name, ir.DataType.FLOAT, value.shape)
            copy = ir.node("Identity", [value], outputs=[converted[name]], name=name)
            graph.insert_before(node, copy)
        node.replace_input_with(1, converted[name])


def convert_widths(graph: ir.Graph, encodings: dict[str, Encoding], grids: dict[str, Grid]) -> None:
    """Insert an Identity, in place, where a value changes to a grid of other bits.

    Args:
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
                if _is_narrow_constant(encodings.get(source)) and node.op_type not in WEIGHED:
                    low, high = activation_grid(encodings[source]).ends
                    encodings[source] = asymmetric_encoding(source, low, high, _WIDE)
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


def _wide_grid(name: str, grid: Grid) -> Grid:
    return activation_grid(asymmetric_encoding(name, *grid.ends, _WIDE))


def _convert(graph: ir.Graph, node: ir.Node, value: ir.Value, grids: dict[str, Grid]) -> ir.Value:
    name = f"{value.name}_as_uint16"
    output = ir.val(name, ir.DataType.FLOAT, value.shape)
    graph.insert_before(node, ir.node("Identity", [value], outputs=[output], name=name))
    grids[name] = _wide_grid(name, grids[str(value.name)])
    return output


def _convert_output(
    graph: ir.Graph, node: ir.Node, value: ir.Value, grids: dict[str, Grid]
) -> None:
    name = str(value.name)
    wide = f"{name}_wide"
    output = ir.val(name, ir.DataType.FLOAT, value.shape)
    value.replace_all_uses_with(output, replace_graph_outputs=True)
    value.name = wide
    narrowing = ir.node("Identity", [value], outputs=[output], name=f"{name}_as_uint8")
    graph.insert_after(node, narrowing)
    grids[wide] = _wide_grid(wide, grids[name])
