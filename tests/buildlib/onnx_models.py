"""Models of a few nodes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Ends: TypeAlias = Mapping[str, tuple[npt.DTypeLike, Sequence[int]]]


def value_info(ends: Ends) -> list[onnx.ValueInfoProto]:
    """Return what ONNX has of values, by name: their types and shapes."""
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        for name, (dtype, shape) in ends.items()
    ]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Ends,
    outputs: Ends,
    constants: Mapping[str, npt.NDArray[Any]],
    opset: int = 21,
) -> onnx.ModelProto:
    """Return the model of some nodes."""
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "sample", value_info(inputs), value_info(outputs), tensors)
    opsets = [helper.make_opsetid("", opset)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model
