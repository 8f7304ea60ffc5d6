"""Numbers computed while importing: shapes, positions, masks, cosines, never weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.reference
import onnx_ir as ir

from buildlib.importing.refusal import Refusal

_LARGEST = 1 << 26
"""Elements of the largest tensor that is computed here: a mask of 8,192 by 8,192."""

_DIRECT = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}


def fold(
    node: ir.Node, inputs: Sequence[npt.NDArray[Any] | None], opset: int
) -> list[npt.NDArray[Any]]:
    """The outputs of `node`.

    Raises:
        Refusal: an operator that onnx has no reference of, or which cannot take these inputs.
    """
    largest = max((array.size for array in inputs if array is not None), default=0)
    if largest > _LARGEST:
        raise Refusal(f"would be computed while importing, on {largest:,} elements", node)
    _check_made(node, [array for array in inputs if array is not None])
    direct = _DIRECT.get(node.op_type)
    given = [array for array in inputs if array is not None]
    if direct is not None and len(given) == 2:
        return [np.asarray(direct(given[0], given[1]))]
    names = [f"in{index}" if array is not None else "" for index, array in enumerate(inputs)]
    outputs = [f"out{index}" for index in range(len(node.outputs))]
    proto = ir.to_proto(node)
    proto.input[:] = names
    proto.output[:] = outputs
    feeds = {name: array for name, array in zip(names, inputs, strict=True) if name}
    try:
        evaluator = onnx.reference.ReferenceEvaluator(
            onnx.helper.make_model(
                onnx.helper.make_graph(
                    [proto],
                    "fold",
                    [onnx.ValueInfoProto(name=name) for name in feeds],
                    [onnx.ValueInfoProto(name=name) for name in outputs],
                ),
                opset_imports=[onnx.helper.make_opsetid(node.domain, opset)],
            )
        )
        with np.errstate(all="ignore"):
            results = evaluator.run(None, feeds)
    except Exception as error:  # the reference raises whatever numpy does
        text = " ".join(str(error).split())[:100]
        reason = f"cannot be computed ({type(error).__name__}: {text})"
        raise Refusal(reason, node) from error
    return [np.asarray(result) for result in results]


def _check_made(node: ir.Node, inputs: Sequence[npt.NDArray[Any]]) -> None:
    """Refuse to make what its few inputs say is large."""
    size = 0.0
    if node.op_type == "ConstantOfShape" and inputs:
        size = float(np.prod(inputs[0].astype(np.float64)))
    elif node.op_type == "Range" and len(inputs) == 3:
        first, end, step = (float(array.reshape(-1)[0]) for array in inputs)
        size = (end - first) / step if step else 0.0
    if size > _LARGEST:
        raise Refusal(f"makes {size:,.0f} numbers while importing", node)
