"""Encodings files, and the grids they describe."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.grid import activation_grid, weight_grid
from buildlib.encodings.model import asymmetric_encoding, symmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.quantize.weight_grids import per_channel_encoding

ONE: dict[str, Any] = {
    "name": "x", "dtype": "INT", "enc_type": "PER_TENSOR", "bw": 16, "is_sym": False,
    "scale": [0.5], "offset": [-3],
}  # fmt: skip


def write(path: Path, **changes: object) -> Path:
    data = {
        "version": "1.0.0",
        "activation_encodings": [ONE],
        "param_encodings": [],
        "producer": "some tool",
    }
    path.write_text(json.dumps(data | changes))
    return path


def test_a_file_survives_load_and_save(tmp_path: Path) -> None:
    loaded = load_encodings(write(tmp_path / "a"))
    again = load_encodings(save_encodings(loaded, tmp_path / "b"))
    assert again == loaded
    assert save_encodings(loaded, tmp_path / "c").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.3.0"}, "version is 0.3.0"),
        ({"version": None}, "version is None"),
        ({"activation_encodings": [ONE, ONE]}, "2 encodings"),
        ({"activation_encodings": [ONE | {"scale": [0.0]}]}, "greater than 0"),
        ({"activation_encodings": [ONE | {"scale": [0.1, 0.2]}]}, "2 scales for 1"),
        ({"activation_encodings": [ONE | {"offset": [1]}]}, "offset"),
        ({"activation_encodings": [ONE | {"offset": [-70000]}]}, "offset"),
        ({"activation_encodings": [ONE | {"bw": 99}]}, "bw"),
        ({"activation_encodings": {"x": ONE}}, "activation_encodings"),
        ({"param_encodings": None}, "param_encodings"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EncodingsError) as caught:
        load_encodings(write(tmp_path / "e", **changes))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b"\x80{")
    with pytest.raises(EncodingsError, match="not valid JSON"):
        load_encodings(tmp_path / "e")
    with pytest.raises(EncodingsError, match="No such file"):
        load_encodings(tmp_path / "none")


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
