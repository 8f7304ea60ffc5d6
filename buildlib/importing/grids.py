"""Encodings of values that the canonical graph has in another form than the source."""

from collections.abc import Iterable

import onnx_ir as ir

from buildlib.encodings.attached import encoding_of, set_encoding
from buildlib.encodings.model import Encoding


def follow(value: ir.Value, sources: Iterable[ir.Value], factor: float = 1.0) -> ir.Value:
    """Give `value`, which has `factor` times the numbers of `sources`, an encoding for them all.

    It keeps what it has when one of them has none, or theirs cannot be joined.
    """
    found = [encoding_of(source) for source in {id(source): source for source in sources}.values()]
    known = [encoding for encoding in found if encoding is not None]
    if known and len(known) == len(found):
        joined = union([times(encoding, factor) for encoding in known])
        if joined is not None:
            set_encoding(value, joined)
    return value


def union(encodings: list[Encoding]) -> Encoding | None:
    """The per-tensor grid that covers all of these; None when they differ in kind."""
    first = encodings[0]
    if all(_grid(encoding) == _grid(first) for encoding in encodings):
        return first
    kinds = {(e.dtype, e.enc_type, e.bw) for e in encodings}
    if len(kinds) > 1 or first.dtype != "INT" or first.enc_type != "PER_TENSOR":
        return None
    steps = (1 << first.bw) - 1
    if all(e.is_sym and e.offset == first.offset for e in encodings):
        return first.model_copy(update={"scale": (max(e.scale[0] for e in encodings),)})
    low = min(e.scale[0] * e.offset[0] for e in encodings)
    high = max(e.scale[0] * (e.offset[0] + steps) for e in encodings)
    scale = (high - low) / steps
    offset = max(-steps, min(0, round(low / scale)))
    return first.model_copy(update={"scale": (scale,), "offset": (offset,), "is_sym": False})


def times(encoding: Encoding, factor: float) -> Encoding:
    """The encoding of `factor` times the numbers; a negative factor mirrors the range."""
    if encoding.dtype != "INT" or factor == 1.0:
        return encoding
    update: dict[str, object] = {"scale": tuple(step * abs(factor) for step in encoding.scale)}
    if factor < 0 and not encoding.is_sym:
        steps = (1 << encoding.bw) - 1
        update["offset"] = tuple(-steps - offset for offset in encoding.offset)
    return encoding.model_copy(update=update)


def _grid(encoding: Encoding) -> tuple[object, ...]:
    return (encoding.dtype, encoding.enc_type, encoding.bw, encoding.scale, encoding.offset)
