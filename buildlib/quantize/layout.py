"""Operators that only move values: both sides must lie on one grid."""

import onnx_ir as ir

from buildlib.graph import interface
from buildlib.graph.values import is_parameter, is_real, source_of

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
