"""AIMET's encodings format 2.0.0, after ONNX's QuantizeLinear: arrays in the shape of the weight.

Format: https://quic.github.io/aimet-pages, encoding format specification 2.0.0 and, for reading,
2.1.0, where LPBQ has an object {x, x_scale, axis} as its `y_scale`. `axis` is that
of the channels, or with `block_size` that of the blocks; the channels' is then told by the shapes.
"""

import re
from collections.abc import Iterator
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
    lines,
    optional,
    read_entry,
    shown,
    small_integers,
)
from buildlib.encodings.model import Encoding, Encodings

_INTEGER = re.compile(r"(u?)int(2|4|8|16|32)")
_FLOATS = {"float16": 16, "bfloat16": 16, "float32": 32}
_WRITABLE_BITS = {2, 4, 8, 16, 32}


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


def write(encodings: Encodings) -> Iterator[bytes]:
    """Yield a file in pieces, an encoding on each line; an unknown axis counts as 0."""
    yield b'{"version": "2.0.0",\n"encodings": ['
    yield from lines(map(_entry, encodings.by_name().values()))
    yield b"\n]}\n"


def _entry(encoding: Encoding) -> Json:
    try:
        return {"name": encoding.name} | _written(encoding)
    except MalformedError as error:
        raise MalformedError(f"{shown(encoding.name)}: {error}") from error


def _written(encoding: Encoding) -> Json:
    bits = encoding.stored_bits
    if encoding.dtype == "FLOAT":
        raise MalformedError(f"FLOAT of {bits} bits cannot be said in 2.0.0")
    if bits not in _WRITABLE_BITS:
        raise MalformedError(f"{bits} bits cannot be said in 2.0.0")
    if encoding.enc_type == "LPBQ":
        return _written_lpbq(encoding)
    half = 1 << (bits - 1)
    signed = encoding.is_sym and set(encoding.offset) == {-half}
    scale = np.array(encoding.scale)
    zero = -np.array(encoding.offset, np.int64) - (half if signed else 0)
    entry: Json = {"output_dtype": f"{'' if signed else 'u'}int{bits}"}
    if encoding.enc_type == "PER_TENSOR":
        return entry | {"y_scale": encoding.scale[0], "y_zero_point": int(zero[0])}
    if encoding.enc_type == "PER_CHANNEL":
        return entry | {
            "y_scale": encoding.scale,
            "y_zero_point": zero.tolist(),
            "axis": encoding.axis or 0,
        }
    if encoding.channels is None:
        raise MalformedError("its blocks do not tell how many channels it has")
    return entry | {
        "y_scale": _nested(scale, encoding.channels, encoding),
        "y_zero_point": _nested(zero, encoding.channels, encoding),
        "axis": _block_axis(encoding),
        "block_size": encoding.block_size,
    }


def _written_lpbq(encoding: Encoding) -> Json:
    bits, n_channels = encoding.stored_bits, len(encoding.scale)
    if encoding.bw != 2 * bits:
        raise MalformedError(f"{bits} bits compressed from {encoding.bw} cannot be said in 2.0.0")
    blocks = np.frombuffer(encoding.per_block_int_scale, np.uint8)
    return {
        "output_dtype": f"int{bits}",
        "per_block_int_scale": _nested(blocks, n_channels, encoding),
        "per_channel_float_scale": _nested(np.array(encoding.scale), n_channels, encoding),
        "axis": _block_axis(encoding),
        "block_size": encoding.block_size,
    }


def _block_axis(encoding: Encoding) -> int:
    if encoding.block_axis is not None:
        return encoding.block_axis
    return 0 if encoding.axis == 1 else 1


def _nested(values: npt.NDArray[Any], n_channels: int, encoding: Encoding) -> list[Any]:
    """Return [channels, blocks] in the layout of a weight with as few axes as possible."""
    array = values.reshape(n_channels, -1)
    block_axis = _block_axis(encoding)
    channel_axis = encoding.axis if encoding.axis is not None else 1 - min(block_axis, 1)
    shape = [1] * (max(channel_axis, block_axis) + 1)
    shape[channel_axis], shape[block_axis] = array.shape
    weight_order = array if channel_axis < block_axis else array.T
    nested: list[Any] = weight_order.reshape(shape).tolist()
    return nested
