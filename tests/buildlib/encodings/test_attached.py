"""Encodings that travel with the values of a graph."""

import onnx_ir as ir
import pytest

from buildlib.encodings.attached import attach, collect, encoding_of, inherit
from buildlib.encodings.model import Encodings, covering
from buildlib.errors import EncodingsError


@pytest.fixture
def model() -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 2]))
    node = ir.node("Relu", [x], outputs=[ir.Value(name="y")])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    return ir.Model(graph, ir_version=10)


def test_an_encoding_follows_a_renamed_value_and_one_made_from_it(model: ir.Model) -> None:
    given = Encodings(
        activation_encodings=(covering("x", 0, 1, 8), covering("y", 0, 2, 16)), param_encodings=()
    )
    attach(model, given)
    assert collect(model) == given
    y = model.graph.outputs[0]
    y.name = "renamed"
    half = inherit(ir.Value(name="half"), y)
    assert [e.name for e in collect(model).activation_encodings] == ["x", "renamed"]
    found = encoding_of(half)
    assert found is not None
    assert (found.name, found.bw) == ("half", 16)


def test_an_encoding_of_no_value_is_refused(model: ir.Model) -> None:
    with pytest.raises(EncodingsError, match="nothing"):
        attach(
            model,
            Encodings(activation_encodings=(covering("nothing", 0, 1, 8),), param_encodings=()),
        )
