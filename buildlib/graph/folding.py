"""Operators of known numbers, computed, and how readers of ONNX refuse a part of a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.reference
import onnx_ir as ir

from buildlib.error_base import one_line

_LARGEST = 1 << 26
"""Elements of the largest tensor that is computed here: a mask of 8,192 by 8,192."""

_DIRECT = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}


class Refusal(Exception):  # noqa: N818  (its catcher makes it an error)
    """A part of a model cannot be read; becomes a `ModelFileError`.

    Attributes:
        node: where; None when it is the model as a whole.
    """

    def __init__(self, reason: str, node: ir.Node | None = None) -> None:
        super().__init__(reason, node)
        self.reason = reason
        self.node = node


def fold(
    node: ir.Node, inputs: Sequence[npt.NDArray[Any] | None], opset: int
) -> list[npt.NDArray[Any]]:
    """Compute the outputs of `node`."""
    arrays = [array for array in inputs if array is not None]
    largest = max((array.size for array in arrays), default=0)
    if largest > _LARGEST:
        raise Refusal(f"would be computed while importing, on {largest:,} elements", node)
    _check_output_size(node, arrays)
    direct = _DIRECT.get(node.op_type)
    if direct is not None and len(arrays) == 2:
        return [np.asarray(direct(*arrays))]
    names = [f"in{index}" if array is not None else "" for index, array in enumerate(inputs)]
    outputs = [f"out{index}" for index in range(len(node.outputs))]
    proto = ir.to_proto(node)
    proto.input[:] = names
    proto.output[:] = outputs
    feeds = {name: array for name, array in zip(names, inputs, strict=True) if name}
    try:
        graph = onnx.helper.make_graph(
            [proto],
            "fold",
            [onnx.ValueInfoProto(name=name) for name in feeds],
            [onnx.ValueInfoProto(name=name) for name in outputs],
        )
        evaluator = onnx.reference.ReferenceEvaluator(graph, opsets={node.domain: opset})
        with np.errstate(all="ignore"):
            results = evaluator.run(None, feeds)
    except Exception as error:  # the reference raises any exception of numpy
        text = one_line(str(error), 100)
        reason = f"cannot be computed ({type(error).__name__}: {text})"
        raise Refusal(reason, node) from error
    return [np.asarray(result) for result in results]


def _check_output_size(node: ir.Node, inputs: Sequence[npt.NDArray[Any]]) -> None:
    """Refuse operators of small inputs and a large output."""
    size = 0.0
    if node.op_type == "ConstantOfShape" and inputs:
        size = float(np.prod(inputs[0].astype(np.float64)))
    elif node.op_type == "Range" and len(inputs) == 3:
        first, end, step = (float(array.reshape(-1)[0]) for array in inputs)
        size = (end - first) / step if step else 0.0
    if size > _LARGEST:
        raise Refusal(f"makes {size:,.0f} numbers while importing", node)
