"""Encodings attached to the values of a graph."""

import numpy as np
import onnx_ir as ir
import pytest

from buildlib.encodings.attachment import attach, collect, encoding_of, inherit
from buildlib.encodings.model import Encodings, asymmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.quantize.weight_grids import per_channel_encoding


@pytest.fixture
def model() -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 2]))
    node = ir.node("Relu", [x], outputs=[ir.Value(name="y")])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    return ir.Model(graph, ir_version=10)


def test_an_encoding_follows_a_renamed_value_and_one_made_from_it(model: ir.Model) -> None:
    both = (asymmetric_encoding("x", 0, 1, 8), asymmetric_encoding("y", 0, 2, 16))
    given = Encodings(activation_encodings=both)
    attach(model, given)
    assert collect(model) == given
    y = model.graph.outputs[0]
    y.name = "renamed"
    half = inherit(ir.Value(name="half"), y)
    assert [e.name for e in collect(model).activation_encodings] == ["x", "renamed"]
    found = encoding_of(half)
    assert found is not None
    assert (found.name, found.bw) == ("half", 16)
    unknown = Encodings(activation_encodings=(asymmetric_encoding("nothing", 0, 1, 8),))
    with pytest.raises(EncodingsError, match="nothing"):
        attach(model, unknown)


def test_axes_count_from_the_front_once_attached(model: ir.Model) -> None:
    """QuantizeLinear, after which format 2.0.0 is made, lets them count from the end."""
    numbers = np.ones((3, 2, 1, 1), np.float32)
    weight = ir.Value(name="w", shape=ir.Shape(numbers.shape), const_value=ir.tensor(numbers))
    model.graph.initializers["w"] = weight
    given = per_channel_encoding("w", numbers, 0, 8)
    for axis in (-4, 0):
        behind = given.model_copy(update={"axis": axis})
        attach(model, Encodings(param_encodings=(behind,)))
        assert encoding_of(weight) == given
    beyond = given.model_copy(update={"axis": -5})
    with pytest.raises(EncodingsError, match="no axis -5"):
        attach(model, Encodings(param_encodings=(beyond,)))
