"""Structure of a graph for quantization: layout operators, output projection, channel axes."""

import onnx_ir as ir

from buildlib.graph import interface
from buildlib.graph.values import is_parameter, is_real, source_of

LAYOUT_OPS = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape",
        "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})


def moved_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs whose values a layout operator moves to its outputs."""
    if node.op_type not in LAYOUT_OPS:
        return []
    inputs = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None]


def shared_grids(graph: ir.Graph) -> list[set[str]]:
    """Return groups of names of values that must share one grid; every float value is in one.

    A cache's input and output belong together. A value that flows into a cache's output does not
    belong to them: it is requantized there, from the activations' bits to the cache's.
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            name = parent[name]
        return name

    for value in graph.inputs:
        if is_real(value):
            name = str(value.name)
            twin = interface.kv_output(name) if interface.is_kv(name) else name
            parent[root(name)] = root(twin)
    for node in graph:
        for output in node.outputs:
            if not is_real(output) or is_parameter(output):
                continue
            name = str(output.name)
            end = root(name)
            for value in moved_inputs(node):
                source = str(source_of(value).name)
                if interface.is_kv(name) and not interface.is_kv(source):
                    continue
                parent[root(source)] = end
    groups: dict[str, set[str]] = {}
    for name in parent:
        groups.setdefault(root(name), set()).add(name)
    return list(groups.values())


def channel_axis(node: ir.Node, index: int) -> int | None:
    """Return the axis of output channels if input `index` is a matrix's weight, else None."""
    if index != 1:
        return None
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    if node.op_type == "MatMul":
        weight = node.inputs[1]
        rank = len(weight.shape) if weight is not None and weight.shape is not None else 2
        return rank - 1
    return 0 if node.op_type == "Conv" else None


def head_products(graph: ir.Graph) -> set[ir.Node]:
    """Return the last products before the logits; empty for a part without logits.

    There are several if adapters are added to the projection, or if it is cut.
    """
    open_values = [value for value in graph.outputs if value.name == interface.LOGITS]
    seen: set[ir.Node] = set()
    products: set[ir.Node] = set()
    while open_values:
        node = open_values.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in _PRODUCTS:
            products.add(node)
        else:
            open_values.extend(value for value in node.inputs if value is not None)
    return products


def head_weights(graph: ir.Graph) -> set[str]:
    """Return the names of the constants in the output projection of a float model."""
    weights = (node.inputs[1] for node in head_products(graph) if len(node.inputs) > 1)
    return {str(source_of(weight).name) for weight in weights if weight is not None}
