"""AIMET's encodings format 2.0.0, after ONNX's QuantizeLinear: arrays in the shape of the weight.

Format: https://quic.github.io/aimet-pages, encoding format specification 2.0.0 and 2.1.0, where
LPBQ has an object {x, x_scale, axis} as its `y_scale`. `axis` is that of the channels, or with
`block_size` that of the blocks; the channels' is then told by the shapes.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.encodings.json_fields import (
    Json,
    MalformedError,
    field,
    flat,
    floats,
    integers,
    optional,
    read_entry,
    shown,
    small_integers,
)
from buildlib.encodings.model import Encodings

_INTEGER = re.compile(r"(u?)int(2|4|8|16|32)")
_FLOATS = {"float16": 16, "bfloat16": 16, "float32": 32}


def read(data: Json) -> Encodings:
    """Read the encodings of a parsed file; those with channels or blocks count as parameters."""
    tensors = [read_entry(entry, _grid) for entry in field(data, "encodings", list)]
    return Encodings(
        activation_encodings=tuple(e for e in tensors if e.enc_type == "PER_TENSOR"),
        param_encodings=tuple(e for e in tensors if e.enc_type != "PER_TENSOR"),
    )


def _grid(entry: Json) -> Json:
    output_dtype = field(entry, "output_dtype", str)
    if output_dtype in _FLOATS:
        return {"dtype": "FLOAT", "enc_type": "PER_TENSOR", "bw": _FLOATS[output_dtype]}
    match = _INTEGER.fullmatch(output_dtype)
    if match is None:
        raise MalformedError(f"output_dtype is {shown(output_dtype)}, which cannot be built")
    unsigned, bits = bool(match[1]), int(match[2])
    if "per_block_int_scale" in entry or isinstance(entry.get("y_scale"), dict):
        return _lpbq(entry, bits, unsigned=unsigned)
    scale = floats(entry, "y_scale")
    zero = np.zeros(scale.shape, np.int64)
    if entry.get("y_zero_point") is not None:
        zero = integers(entry, "y_zero_point")
    if zero.shape != scale.shape:
        raise MalformedError(f"y_zero_point of shape {zero.shape}, y_scale {scale.shape}")
    grid: dict[str, Any] = {"dtype": "INT", "enc_type": "PER_TENSOR", "bw": bits}
    axis, block_size = optional(entry, "axis", int), optional(entry, "block_size", int)
    if block_size is not None:
        block_axis = _axis(axis, scale.ndim)
        channel_axis = _channel_axis(scale.shape, block_axis)
        scale, zero = (_by_channel(array, channel_axis, block_axis) for array in (scale, zero))
        grid |= {"enc_type": "PER_BLOCK", "block_size": block_size, "channels": len(scale)}
        grid |= {"axis": channel_axis, "block_axis": block_axis}
    elif axis is not None:
        grid |= {"enc_type": "PER_CHANNEL", "axis": axis}
    half = 0 if unsigned else 1 << (bits - 1)
    return grid | {
        "is_sym": not unsigned and not zero.any(),
        "scale": flat(scale),
        "offset": flat(-zero - half),
    }


def _lpbq(entry: Json, bits: int, *, unsigned: bool) -> Json:
    meta = entry.get("y_scale")
    if isinstance(meta, dict):
        blocks, scale = small_integers(meta, "x"), floats(meta, "x_scale")
        if meta.get("block_size") is not None or _not_zero(meta, "x_zero_point"):
            raise MalformedError("its y_scale has blocks or zero points of its own")
    else:
        blocks = small_integers(entry, "per_block_int_scale")
        scale = floats(entry, "per_channel_float_scale")
    if unsigned or _not_zero(entry, "y_zero_point"):
        raise MalformedError("LPBQ with zero points cannot be built")
    block_axis = _axis(optional(entry, "axis", int), blocks.ndim)
    channel_axis = _channel_axis(blocks.shape, block_axis)
    blocks = _by_channel(blocks, channel_axis, block_axis)
    if scale.size != len(blocks):
        raise MalformedError(f"{scale.size} channel scales for {len(blocks)} channels")
    return {
        "dtype": "INT",
        "enc_type": "LPBQ",
        "bw": 2 * bits,
        "compressed_bw": bits,
        "is_sym": True,
        "scale": flat(scale),
        "offset": (-(1 << (2 * bits - 1)),) * scale.size,
        "block_size": field(entry, "block_size", int),
        "per_block_int_scale": blocks.tobytes(),
        "axis": channel_axis,
        "block_axis": block_axis,
    }


def _not_zero(entry: Json, key: str) -> bool:
    return entry.get(key) is not None and bool(integers(entry, key).any())


def _axis(axis: int | None, rank: int) -> int:
    """Return the axis of blocks, counted from the front."""
    if axis is None or rank < 2 or not -rank <= axis < rank:
        raise MalformedError(f"blocks along axis {axis} of scales of rank {rank}")
    return axis % rank


def _channel_axis(shape: tuple[int, ...], block_axis: int) -> int:
    """Return the only axis longer than 1 besides that of the blocks, or its neighbour."""
    longer = [axis for axis, size in enumerate(shape) if size > 1 and axis != block_axis]
    if len(longer) > 1:
        raise MalformedError(f"scales of shape {shape} have more than one channel axis")
    return longer[0] if longer else int(block_axis == 0)


def _by_channel(array: npt.NDArray[Any], channel_axis: int, block_axis: int) -> npt.NDArray[Any]:
    """Return the array as [channels, blocks]."""
    n_channels, n_blocks = array.shape[channel_axis], array.shape[block_axis]
    flat = array.reshape(-1)
    if channel_axis < block_axis:
        return flat.reshape(n_channels, n_blocks)
    return np.ascontiguousarray(flat.reshape(n_blocks, n_channels).T)
