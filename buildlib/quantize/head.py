"""The output projection of a decoder: the products that make its logits."""

import onnx_ir as ir

from buildlib.graph import interface
from buildlib.graph.values import source_of

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})


def head_products(graph: ir.Graph) -> set[ir.Node]:
    """The last products before the logits; none in a part that has no logits.

    There are several where adapters are added to the projection, or where it is cut.
    """
    open_values = [value for value in graph.outputs if value.name == interface.LOGITS]
    seen: set[ir.Node] = set()
    found: set[ir.Node] = set()
    while open_values:
        node = open_values.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in _PRODUCTS:
            found.add(node)
        else:
            open_values.extend(value for value in node.inputs if value is not None)
    return found


def head_weights(graph: ir.Graph) -> set[str]:
    """Names of the constants that the head of a float model multiplies with."""
    weights = (node.inputs[1] for node in head_products(graph) if len(node.inputs) > 1)
    return {str(source_of(weight).name) for weight in weights if weight is not None}
