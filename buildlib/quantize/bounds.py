"""Ranges that no text needs to show: of fixed inputs, and of functions with bounded results."""

import math
from collections.abc import Mapping

import onnx_ir as ir

from buildlib.encodings.grid import Grid
from buildlib.graph import interface

Range = tuple[float, float]

_INPUTS: dict[str, Range] = {
    interface.ATTENTION_MASK: (interface.MASKED, 0.0),
    interface.COS: (-1.0, 1.0),
    interface.SIN: (-1.0, 1.0),
}
_FUNCTIONS: dict[str, Range] = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0)}
_ROTATIONS = {interface.COS, interface.SIN}


def fixed_ranges(graph: ir.Graph) -> dict[str, Range]:
    """By name, of the inputs that Genie feeds and of the values of bounded functions."""
    found = {str(v.name): _INPUTS[str(v.name)] for v in graph.inputs if str(v.name) in _INPUTS}
    for node in graph:
        if node.op_type in _FUNCTIONS:
            found[str(node.outputs[0].name)] = _FUNCTIONS[node.op_type]
    return found


def rotated_ranges(graph: ir.Graph, grids: Mapping[str, Grid]) -> dict[str, Range]:
    """By name, of what rotary embeddings make of values on known grids.

    They keep lengths: a product with a cosine is no larger than what is rotated, and the sum of two
    such products at most sqrt(2) times.
    """
    products: dict[str, float] = {}
    sums: dict[str, float] = {}
    for node in graph:
        names = [str(value.name) for value in node.inputs if value is not None]
        output = str(node.outputs[0].name)
        if node.op_type == "Mul" and _ROTATIONS & set(names):
            data = next((name for name in names if name not in _ROTATIONS), None)
            if data is not None and data in grids:
                products[output] = _magnitude(grids[data])
        elif node.op_type in {"Add", "Sub"} and names and all(name in products for name in names):
            sums[output] = math.sqrt(2.0) * max(products[name] for name in names)
    return {name: (-largest, largest) for name, largest in (products | sums).items()}


def _magnitude(grid: Grid) -> float:
    ends = [(limit - grid.zero_point[0]) * grid.scale[0] for limit in grid.limits]
    return max(abs(end) for end in ends)
