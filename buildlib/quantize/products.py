"""Products with weights in blocks, in the one form that the QNN provider compiles rightly.

It fuses a MatMul with LPBQ weights of shape [in, out]. A Gemm it leaves alone, or with a bias
compiles to other numbers (seen with QNN 2.51).
"""

from collections.abc import Mapping

import onnx_ir as ir

from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding, covering
from buildlib.graph.files import tensor_array
from buildlib.graph.values import source_of
from buildlib.quantize.weights import value_range


def unfold_block_products(
    graph: ir.Graph, encodings: dict[str, Encoding], grids: dict[str, Grid]
) -> set[ir.Node]:
    """Make each Gemm with weights in blocks a MatMul, and an Add if it has a bias.

    Args:
        graph: of a float model; changed in place.
        encodings: by name; biases without one of 8 or 16 bits get one.
        grids: of activations; the new products get one.

    Returns:
        The MatMuls whose weight is still [out, in], to be stored transposed.
    """
    transposed: set[ir.Node] = set()
    for node in list(graph):
        if node.op_type == "Gemm" and _in_blocks(node, encodings):
            product = _unfold(graph, node, encodings, grids)
            if node.attributes.get_int("transB", 0):
                transposed.add(product)
    return transposed


def _in_blocks(node: ir.Node, encodings: Mapping[str, Encoding]) -> bool:
    weight = node.inputs[1]
    encoding = None if weight is None else encodings.get(str(source_of(weight).name))
    scaled = any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
    plain = not scaled and not node.attributes.get_int("transA", 0)
    return plain and encoding is not None and encoding.block_size is not None


def _unfold(
    graph: ir.Graph, node: ir.Node, encodings: dict[str, Encoding], grids: dict[str, Grid]
) -> ir.Node:
    data, weight = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    end = node.outputs[0]
    name = str(end.name)
    output = ir.Value(name=name, type=end.type, shape=end.shape)
    made = output
    if bias is not None:
        made = ir.Value(name=f"{name}_product", type=end.type, shape=end.shape)
    nodes = [ir.node("MatMul", [data, weight], outputs=[made], name=f"{node.name}_product")]
    if bias is not None:
        nodes.append(ir.node("Add", [made, bias], outputs=[output], name=f"{node.name}_bias"))
        low, high = _bias_range(bias, encodings)
        grids[f"{name}_product"] = _widened(f"{name}_product", grids[name], low, high)
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
    given = encodings.get(name)
    if given is None or given.dtype != "INT" or given.bw > 16:
        encodings[name] = covering(name, low, high, 16)
    return low, high


def _widened(name: str, grid: Grid, low: float, high: float) -> Grid:
    """The grid of values which, with [low, high] added, lie on `grid`."""
    bottom, top = ((limit - grid.zero_point[0]) * grid.scale[0] for limit in grid.limits)
    return activation_grid(covering(name, bottom - high, top - low, grid.bits))
