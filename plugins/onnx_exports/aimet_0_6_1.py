"""AIMET's encodings format 0.6.1: a list for each tensor name, of one encoding or one a channel.

Format: https://quic.github.io/aimet-pages, encoding format specification 0.6.1. Booleans are the
strings "True" and "False"; blocks do not exist.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.encodings.json_fields import (
    Json,
    MalformedError,
    boolean,
    field,
    flat,
    floats,
    integers,
    make_encoding,
    shown,
)
from buildlib.encodings.model import Encoding, Encodings

_GROUPS = ("activation_encodings", "param_encodings")


def read(data: Json) -> Encodings:
    """Read the encodings of a parsed file."""
    activations, params = (
        tuple(_read_tensor(name, cells) for name, cells in field(data, group, dict).items())
        for group in _GROUPS
    )
    return Encodings(activation_encodings=activations, param_encodings=params)


def _read_tensor(name: str, cells: object) -> Encoding:
    return make_encoding(name, lambda: _grid(_checked(cells)))


def _checked(cells: object) -> list[Json]:
    if not isinstance(cells, list) or not cells:
        raise MalformedError(f"its encodings are {shown(cells)}")
    if not all(isinstance(cell, dict) for cell in cells):
        raise MalformedError("one of its encodings is not an object")
    return cells


def _grid(cells: list[Json]) -> Json:
    first = cells[0]
    for key in ("dtype", "bitwidth", "is_symmetric"):
        value = first.get(key)
        if any([cell.get(key) != value for cell in cells]):  # noqa: C419  (a list is faster)
            raise MalformedError(f"its channels differ in {key}")
    dtype, bits = field(first, "dtype", str).upper(), field(first, "bitwidth", int)
    if dtype not in {"INT", "FLOAT"}:
        raise MalformedError(f"dtype is {shown(dtype)}; known are int, float")
    enc_type = "PER_TENSOR" if len(cells) == 1 else "PER_CHANNEL"
    grid: dict[str, Any] = {"dtype": dtype, "enc_type": enc_type, "bw": bits}
    if dtype == "FLOAT":
        return grid
    scale = floats(_column(cells, "scale"), "scale")
    offset = integers(_column(cells, "offset"), "offset")
    if scale.ndim != 1 or offset.ndim != 1:
        raise MalformedError("scale and offset must be numbers")
    if scale.min() > 0.0:
        with np.errstate(over="ignore"):
            _check_limits(cells, scale, offset, bits)
    return grid | {
        "is_sym": boolean(first, "is_symmetric"),
        "scale": flat(scale),
        "offset": flat(offset),
    }


def _column(cells: list[Json], key: str) -> Json:
    return {key: [cell.get(key) for cell in cells]}


def _check_limits(
    cells: list[Json], scale: npt.NDArray[np.float64], offset: npt.NDArray[np.int64], bits: int
) -> None:
    """Check that the ends of the grid, if given, follow from scale and offset."""
    steps = (1 << min(max(bits, 1), 32)) - 1
    for key, ends in (("min", scale * offset), ("max", scale * (offset + steps))):
        column = _column(cells, key)
        if None in column[key]:
            continue
        stated_ends = floats(column, key)
        if stated_ends.ndim != 1:
            raise MalformedError(f"{key} must be a number")
        # A strictly symmetric grid ends a step early, and files are written from float32.
        tolerance = 2.0 * scale + 1e-3 * np.abs(ends)
        if not (np.abs(stated_ends - ends) <= tolerance).all():
            raise MalformedError(f"its {key} is not what its scale and offset say")
