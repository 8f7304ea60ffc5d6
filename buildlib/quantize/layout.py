"""Operators that only move values: both sides must lie on one grid."""

import onnx_ir as ir

from buildlib.graph import interface

LAYOUT_OPS = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape",
        "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip


def moved_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs whose values a layout operator moves to its outputs."""
    if node.op_type not in LAYOUT_OPS:
        return []
    inputs = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None]


def source_of(value: ir.Value) -> ir.Value:
    """The stored initializer that `value` is a cast of, or `value` itself."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def is_parameter(value: ir.Value) -> bool:
    """Whether the value is a constant of the model, as stored or cast."""
    return source_of(value).is_initializer()


def is_real(value: ir.Value) -> bool:
    """Whether the value holds numbers to quantize (token ids and shapes do not)."""
    return source_of(value).dtype in {
        ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
    }  # fmt: skip


def shared_grids(graph: ir.Graph) -> list[set[str]]:
    """Names of values that must share one grid, every float value in one set.

    A cache's input and output belong together. What flows into a cache's output does not: there the
    values are requantized, from the activations' bits to the cache's.
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
            twin = name.removesuffix("_in") + "_out" if interface.is_kv(name) else name
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
