"""Models of a few nodes, and runs of models on random inputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from buildlib.numerics.runners import OnnxRunner, read_ports

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
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


def random_feeds(path: Path) -> Arrays:
    """Return inputs of a model, the same for the same names, shapes and types."""
    feeds: Arrays = {}
    for name, port in read_ports(path).inputs.items():
        rng = np.random.default_rng([*name.encode()])
        is_real = port.dtype.kind == "f"
        numbers = rng.normal(size=port.shape) if is_real else rng.integers(0, 50, port.shape)
        feeds[name] = numbers.astype(port.dtype)
    return feeds


def run_once(path: Path, feeds: Arrays | None = None) -> Arrays:
    """Return all outputs of a model by name, for random inputs unless there are others."""
    return {**OnnxRunner(path, n_threads=1).run(random_feeds(path) if feeds is None else feeds)}


def assert_near(actual: Arrays, expected: Arrays, tolerance: float = 1e-5) -> None:
    """Check outputs of two models, by name and relative to the largest value of each."""
    assert list(actual) == list(expected)
    for name, values in expected.items():
        assert actual[name].shape == values.shape
        bound = tolerance * np.abs(values).max()
        np.testing.assert_allclose(actual[name], values, rtol=0, atol=bound, err_msg=name)
