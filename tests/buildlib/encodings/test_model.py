"""Grids of encodings: the integers of values, and the values of integers."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.encodings.attachment import attach, collect, encoding_of, inherit
from buildlib.encodings.grid import activation_grid, weight_grid
from buildlib.encodings.model import Encodings, asymmetric_encoding, symmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.quantize.weight_grids import per_channel_encoding

FINITE = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@given(low=FINITE, high=FINITE, bits=st.sampled_from([8, 16]))
def test_a_covering_grid_covers_within_half_a_step(low: float, high: float, bits: int) -> None:
    low, high = min(low, high), max(low, high)
    grid = activation_grid(asymmetric_encoding("x", low, high, bits))
    values = np.linspace(low, high, 50, dtype=np.float32)
    error = np.abs(grid.dequantize(grid.quantize(values)) - values).max()
    assert error <= grid.scale[0] * 1.01 + 1e-6 * max(abs(low), abs(high))
    assert grid.dequantize(grid.quantize(np.zeros(1, np.float32)))[0] == 0.0


@given(magnitude=st.floats(0, 1e6, width=32))
def test_a_cache_grid_lies_around_128(magnitude: float) -> None:
    grid = activation_grid(symmetric_encoding("k", magnitude, 8))
    assert (grid.dtype.name, grid.zero_point) == ("uint8", (128,))
    assert grid.quantize(np.array([0.0]))[0] == 128


def test_the_mask_is_0_where_hidden_and_65535_where_seen() -> None:
    grid = activation_grid(asymmetric_encoding("attention_mask", -100.0, 0.0, 16))
    np.testing.assert_array_equal(grid.quantize(np.array([-100.0, 0.0])), [0, 65535])


def test_channels_have_their_own_scales() -> None:
    weights = np.array([[1.0, -2.0], [0.0, 0.0], [127.0, 3.0]], dtype=np.float32)
    grid = weight_grid(per_channel_encoding("w", weights, 0, 8))
    assert (grid.dtype.name, grid.zero_point) == ("int8", (0, 0, 0))
    stored = grid.quantize(weights, 0)
    np.testing.assert_array_equal(stored, [[64, -127], [0, 0], [127, 3]])
    with pytest.raises(EncodingsError, match="finite"):
        per_channel_encoding("w", np.full((2, 2), np.inf, np.float32), 0, 8)


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
