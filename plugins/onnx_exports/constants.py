"""Values that do not depend on the text: folded numbers, and weights, which are not read."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal, fold
from plugins.onnx_exports import array_layout as layout
from plugins.onnx_exports.values import AbstractValue, Concrete, Numbers, Weight, dims_in_file

_LARGE_RANK = 2
_LAZY = layout.PASS_THROUGH | {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}
_ANGLES = frozenset({"Cos", "Sin"})  # of positions, which some exports make from sizes of tensors


def compute(node: ir.Node, inputs: list[AbstractValue | None], opset: int) -> list[AbstractValue]:
    """Return the outputs of a node that reads numbers and weights alone."""
    first = inputs[0] if inputs else None
    if isinstance(first, Weight) and node.op_type in _LAZY:
        view = _weight_view(node, first, inputs[1:])
        if view is not None:
            return [view]
    numbers = [part.concrete if isinstance(part, Weight) else part for part in inputs]
    varies = node.op_type in _ANGLES or any(
        isinstance(part, Concrete) and part.varies for part in numbers
    )
    source = None
    if node.op_type in _LAZY - {"Transpose"} and isinstance(numbers[0], Concrete):
        source = numbers[0].source
    arrays = arrays_of(numbers)
    if node.op_type in layout.LAYOUT and arrays[0] is not None:
        move = layout.array_function(node, arrays[0].ndim, arrays[1:])
        return [Concrete(np.asarray(move(arrays[0])), varies, source)]
    return [Concrete(array, varies, source) for array in fold(node, arrays, opset)]


def _weight_view(
    node: ir.Node, weight: Weight, parameters: list[AbstractValue | None]
) -> Weight | None:
    """Return a weight seen through an operator that keeps its two dimensions apart."""
    if node.op_type in layout.PASS_THROUGH:
        to = node.attributes.get_int("to", None)
        floating = to is None or ir.DataType(to).is_floating_point()
        return weight if floating else None
    move = layout.array_function(node, len(weight.dims), arrays_of(parameters))
    dims = move(np.broadcast_to(np.int8(0), weight.dims)).shape
    if node.op_type == "Transpose":
        if len(weight.dims) != 2:
            return None
        swapped = tuple(node.attributes.get_ints("perm", (1, 0))) == (1, 0)
        return Weight(weight.source, dims, weight.transposed != swapped)
    new, old = ([dim for dim in some if dim != 1] for some in (dims, weight.dims))
    return Weight(weight.source, dims, weight.transposed) if new == old else None


def initializer(value: ir.Value) -> AbstractValue:
    """Return a weight, or the numbers of a small or non-float tensor."""
    tensor = value.const_value
    if tensor is None:
        raise Refusal(f"initializer {value.name} has no numbers")
    weight = Weight(value, dims_in_file(value))
    if len(weight.dims) >= _LARGE_RANK and tensor.dtype.is_floating_point():
        return weight
    return weight.concrete


def constant(node: ir.Node) -> AbstractValue:
    """Return the numbers of a Constant; one that holds a tensor is treated as an initializer."""
    for name in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if name not in node.attributes:
            continue
        attribute = node.attributes[name]
        if name == "value":
            value = node.outputs[0]
            value.const_value = attribute.as_tensor()
            return initializer(value)
        kind = np.float32 if "float" in name else np.int64
        return Concrete(np.array(attribute.value, dtype=kind))
    raise Refusal("has a constant of an unknown kind", node)


def shape_of(node: ir.Node, value: AbstractValue) -> Concrete:
    """Return the result of a Shape."""
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", None)
    return Concrete(np.array(value.shape[start:end], dtype=np.int64))


def arrays_of(values: Sequence[AbstractValue | None]) -> list[Numbers | None]:
    """Return the numbers of parameters such as shapes and axes; None for an absent one."""
    numbers = [part.concrete if isinstance(part, Weight) else part for part in values]
    return [part.array if isinstance(part, Concrete) else None for part in numbers]
