"""Layout operators, which only move elements, as functions of numpy arrays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.graph.folding import Refusal

_LARGEST = 1 << 29
"""Elements of the largest tensor: 64 heads of 128, repeated, over 65,536 slots."""

Array = npt.NDArray[Any]
ArrayFunction = Callable[[Array], Array]

PASS_THROUGH = frozenset({"Identity", "Cast", "CastLike", "Dropout"})
"""Operators that keep numbers unchanged, up to their type."""

LAYOUT = frozenset({
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather", "Expand", "Tile",
})  # fmt: skip
"""Operators with one tensor to move, and one result."""

LAST_AXIS_SAFE = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand"})


def array_function(node: ir.Node, rank: int, parameters: Sequence[Array | None]) -> ArrayFunction:
    """Return the effect of `node` on its first input, of a rank, as a function of arrays.

    Args:
        parameters: other inputs, as numbers; in old opsets they are attributes.
    """
    return _MOVERS[node.op_type](_Call(node, rank, parameters))


def split(node: ir.Node, array: Array, sizes: Array | None) -> list[Array]:
    """Return the pieces of a Split."""
    axis = node.attributes.get_int("axis", 0)
    parts: Sequence[int] | None = sizes.tolist() if sizes is not None else None
    if parts is None and "split" in node.attributes:
        parts = list(node.attributes["split"].as_ints())
    if parts is None:
        count = len(node.outputs)
        step = math.ceil(array.shape[axis] / count)
        parts = [step] * (count - 1) + [array.shape[axis] - step * (count - 1)]
    if sum(parts) != array.shape[axis]:
        raise Refusal(f"splits {array.shape[axis]} elements into {list(parts)}", node)
    return np.split(array, np.cumsum(parts)[:-1], axis=axis)


def check_size(node: ir.Node, size: int) -> None:
    """Refuse tensors larger than any decoder has, before they are made."""
    if size > _LARGEST:
        raise Refusal(f"makes a tensor of {size:,} elements", node)


def axis_of(node: ir.Node, default: int = 0) -> int:
    """Return the attribute `axis`."""
    return node.attributes.get_int("axis", default)


@dataclass(frozen=True)
class _Call:
    """A node with its parameters, wherever its opset puts them."""

    node: ir.Node
    rank: int
    parameters: Sequence[Array | None]

    def ints(self, index: int, name: str) -> list[int] | None:
        """Return integers given as input `index` after the first, or as attribute `name`."""
        numbers = self.parameters[index] if index < len(self.parameters) else None
        if numbers is not None:
            return [int(number) for number in numbers.reshape(-1)]
        if name in self.node.attributes:
            return list(self.node.attributes[name].as_ints())
        return None


def _reshape(call: _Call) -> ArrayFunction:
    target = call.ints(0, "shape")
    if target is None:
        raise Refusal("has no target shape", call.node)
    keep_zero = call.node.attributes.get_int("allowzero", 0)

    def move(array: Array) -> Array:
        dims = [
            array.shape[axis] if dim == 0 and not keep_zero else dim
            for axis, dim in enumerate(target)
        ]
        return array.reshape(dims)

    return move


def _transpose(call: _Call) -> ArrayFunction:
    perm = call.node.attributes.get("perm")
    return lambda array: np.transpose(array, perm.as_ints() if perm is not None else None)


def _squeeze(call: _Call) -> ArrayFunction:
    axes = call.ints(0, "axes")
    return lambda array: np.squeeze(array, tuple(axes) if axes is not None else None)


def _unsqueeze(call: _Call) -> ArrayFunction:
    axes = tuple(call.ints(0, "axes") or ())
    return lambda array: np.expand_dims(array, axes)


def _flatten(call: _Call) -> ArrayFunction:
    axis = call.node.attributes.get_int("axis", 1) % (call.rank + 1)
    return lambda array: array.reshape(math.prod(array.shape[:axis]), -1)


def _slice(call: _Call) -> ArrayFunction:
    starts, ends = call.ints(0, "starts"), call.ints(1, "ends")
    if starts is None or ends is None:
        raise Refusal("has no bounds", call.node)
    axes = call.ints(2, "axes") or list(range(len(starts)))
    steps = call.ints(3, "steps") or [1] * len(starts)
    where = [slice(None)] * call.rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        before_first = step < 0 and end < -(1 << 31)
        where[axis] = slice(start, None if before_first else end, step)
    return lambda array: array[tuple(where)]


def _gather(call: _Call) -> ArrayFunction:
    indices = call.parameters[0]
    if indices is None:
        raise Refusal("has no indices", call.node)
    axis = call.node.attributes.get_int("axis", 0)
    return lambda array: np.take(array, indices.astype(np.int64), axis=axis)


def _expand(call: _Call) -> ArrayFunction:
    target = tuple(call.ints(0, "shape") or ())

    def move(array: Array) -> Array:
        dims = np.broadcast_shapes(array.shape, target)
        check_size(call.node, math.prod(dims))
        return np.broadcast_to(array, dims)

    return move


def _tile(call: _Call) -> ArrayFunction:
    repeats = call.ints(0, "repeats") or []

    def move(array: Array) -> Array:
        check_size(call.node, array.size * math.prod(repeats))
        return np.tile(array, repeats)

    return move


_MOVERS: dict[str, Callable[[_Call], ArrayFunction]] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
    "Slice": _slice,
    "Gather": _gather,
    "Expand": _expand,
    "Tile": _tile,
}
