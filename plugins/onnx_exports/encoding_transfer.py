"""Transfer of encodings to values that the canonical graph has in another form than the source."""

from collections.abc import Iterable

import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, set_encoding
from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError
from plugins.onnx_exports.roles import Role, cache_name
from plugins.onnx_exports.values import Weight, dims_in_file

_SAME = 1e-6  # of scales that files round


def transfer_encoding(
    value: ir.Value, sources: Iterable[ir.Value], factor: float = 1.0
) -> ir.Value:
    """Give `value`, which is `factor` times `sources`, an encoding that covers them all.

    `value` keeps its own if a source has none, or if theirs cannot be united.
    """
    encodings = [encoding_of(source) for source in dict.fromkeys(sources)]
    scaled = [scale_encoding(one, factor) for one in encodings if one is not None]
    if scaled and len(scaled) == len(encodings):
        union = union_encoding(scaled)
        if union is not None:
            set_encoding(value, union)
    return value


def transfer_from_view(weight: Weight, view: ir.Value) -> None:
    """Give a weight without an encoding that of its cast, transpose or reshape `view`."""
    encoding = encoding_of(view)
    if encoding is None or weight.source is view or encoding_of(weight.source) is not None:
        return
    dims = dims_in_file(weight.source)
    encoding = reshape_encoding(encoding, weight.dims, dims[::-1] if weight.transposed else dims)
    if weight.transposed:
        axes = {"axis": encoding.axis, "block_axis": encoding.block_axis}
        update = {key: len(dims) - 1 - axis for key, axis in axes.items() if axis is not None}
        encoding = encoding.model_copy(update=update)
    set_encoding(weight.source, encoding)


def reshape_encoding(
    encoding: Encoding, before: tuple[int, ...], after: tuple[int, ...]
) -> Encoding:
    """Return the encoding of a tensor that gained or lost dimensions of 1.

    An axis of size 1 cannot be found again: it becomes the operator's own.
    """
    old, new = ([i for i, size in enumerate(dims) if size != 1] for dims in (before, after))
    update: dict[str, int | None] = {}
    for key, axis in (("axis", encoding.axis), ("block_axis", encoding.block_axis)):
        if axis is not None and axis >= len(before):
            raise EncodingsError(encoding.name, f"it has no {key} {axis}")
        if axis is not None and before != after:
            update[key] = new[old.index(axis)] if axis in old and len(old) == len(new) else None
    return encoding.model_copy(update=update) if update else encoding


def check_caches(model: ir.Model, roles: Iterable[Role]) -> None:
    """Check that a cache's output and input, which it feeds, have encodings of the same meaning."""
    outputs = {cache_name(str(value.name)): value for value in model.graph.outputs}
    for role in roles:
        if role.kind not in {"key", "value"}:
            continue
        output = outputs.get((role.kind, role.layer, role.head))
        past = encoding_of(role.value)
        new = None if output is None else encoding_of(output)
        if past is not None and new is not None and not _agree(past, new):
            reason = (
                f"it lies on another grid than {new.name}, which is fed to it: "
                f"{_in_words(past)} and {_in_words(new)}"
            )
            raise EncodingsError(past.name, reason)


def _agree(one: Encoding, other: Encoding) -> bool:
    kinds = [(e.dtype, e.enc_type, e.bw, e.offset) for e in (one, other)]
    if kinds[0] != kinds[1] or len(one.scale) != len(other.scale):
        return False
    return all(abs(a - b) <= _SAME * a for a, b in zip(one.scale, other.scale, strict=True))


def _in_words(encoding: Encoding) -> str:
    if encoding.dtype != "INT" or len(encoding.scale) != 1:
        return f"{encoding.dtype} {encoding.enc_type}"
    return f"{encoding.bw} bits, {encoding.scale[0]:.6g} ({encoding.offset[0]})"


def union_encoding(encodings: list[Encoding]) -> Encoding | None:
    """Return the per-tensor encoding that covers all of these, or None if they differ in kind."""
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


def scale_encoding(encoding: Encoding, factor: float) -> Encoding:
    """Return the encoding of `factor` times the numbers; a negative factor mirrors the range."""
    if encoding.dtype != "INT" or factor == 1.0:
        return encoding
    update: dict[str, object] = {"scale": tuple(step * abs(factor) for step in encoding.scale)}
    if factor < 0 and not encoding.is_sym:
        steps = (1 << encoding.bw) - 1
        update["offset"] = tuple(-steps - offset for offset in encoding.offset)
    return encoding.model_copy(update=update)


def _grid(encoding: Encoding) -> tuple[object, ...]:
    return (encoding.dtype, encoding.enc_type, encoding.bw, encoding.scale, encoding.offset)
