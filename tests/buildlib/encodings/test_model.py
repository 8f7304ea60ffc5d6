"""Grids of encodings: the integers of values, and the values of integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.encodings.grid import activation_grid, weight_grid
from buildlib.encodings.model import asymmetric_encoding, symmetric_encoding
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
