"""AIMET's encodings format 1.0.0: lists of encodings, flat arrays, axes from the operator.

Format: https://quic.github.io/aimet-pages, encoding format specification 1.0.0. Of LPBQ, `scale`
holds a float for each channel, `bw` the bits after decompression, and `per_block_int_scale` the
blocks channel by channel. `axis`, `block_axis` and `channels` are ours, written where they are
known.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic_core import to_json

from buildlib.encodings.json_fields import (
    Json,
    MalformedError,
    boolean,
    field,
    flat,
    floats,
    integers,
    optional,
    read_entry,
    shown,
    small_integers,
)
from buildlib.encodings.model import Encoding, Encodings, EncType

_GROUPS = ("activation_encodings", "param_encodings")
_BLOCK_TYPES = {"PER_BLOCK", "LPBQ"}


def read(data: Json) -> Encodings:
    """Read the encodings of a parsed file."""
    activations, params = (
        tuple(read_entry(entry, _grid) for entry in field(data, group, list)) for group in _GROUPS
    )
    return Encodings(activation_encodings=activations, param_encodings=params)


def _grid(entry: Json) -> Json:
    dtype, enc_type = field(entry, "dtype", str).upper(), field(entry, "enc_type", str).upper()
    if dtype not in {"INT", "FLOAT"}:
        raise MalformedError(f"dtype is {shown(dtype)}; known are INT, FLOAT")
    if enc_type not in get_args(EncType):
        names = ", ".join(get_args(EncType))
        raise MalformedError(f"enc_type is {shown(enc_type)}; known are {names}")
    grid: dict[str, Any] = {"dtype": dtype, "enc_type": enc_type, "bw": field(entry, "bw", int)}
    if dtype == "FLOAT":
        return grid
    if any(entry.get("zero_point_shift") or ()):
        raise MalformedError("it has a zero_point_shift, which cannot be built")
    grid["is_sym"] = boolean(entry, "is_sym")
    grid["scale"] = flat(floats(entry, "scale"))
    grid["offset"] = flat(integers(entry, "offset"))
    if enc_type != "PER_TENSOR":
        grid["axis"] = optional(entry, "axis", int)
    if enc_type in _BLOCK_TYPES:
        grid["block_axis"] = optional(entry, "block_axis", int)
        grid["block_size"] = field(entry, "block_size", int)
    if enc_type == "PER_BLOCK":
        grid["channels"] = optional(entry, "channels", int)
    if enc_type == "LPBQ":
        grid["compressed_bw"] = field(entry, "compressed_bw", int)
        grid["per_block_int_scale"] = small_integers(entry, "per_block_int_scale").tobytes()
    return grid


def write(encodings: Encodings) -> Iterator[bytes]:
    """Yield a file in pieces, an encoding on each line."""
    yield b'{"version": "1.0.0"'
    for group in _GROUPS:
        yield f',\n"{group}": ['.encode()
        for number, encoding in enumerate(getattr(encodings, group)):
            yield (b",\n" if number else b"\n") + to_json(_entry(encoding))
        yield b"\n]"
    yield b"}\n"


def _entry(encoding: Encoding) -> Json:
    entry: dict[str, Any] = {
        "name": encoding.name,
        "dtype": encoding.dtype,
        "enc_type": encoding.enc_type,
        "bw": encoding.bw,
    }
    if encoding.dtype == "FLOAT":
        return entry
    entry |= {"is_sym": encoding.is_sym, "scale": encoding.scale, "offset": encoding.offset}
    for key in ("axis", "block_axis", "block_size", "channels", "compressed_bw"):
        if getattr(encoding, key) is not None:
            entry[key] = getattr(encoding, key)
    if encoding.per_block_int_scale:
        entry["per_block_int_scale"] = list(encoding.per_block_int_scale)
    return entry
