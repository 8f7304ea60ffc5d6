"""Encodings attached to the values of a graph, with which they travel.

A pass that renames or moves a value takes its encoding along without knowing. A pass that makes a
new value tells where its encoding comes from, with `inherit` or `set_encoding`.
"""

from collections.abc import Iterator

import onnx_ir as ir

from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import EncodingsError

_KEY = "qnnfarm.encoding"


def attach(model: ir.Model, encodings: Encodings) -> None:
    """Attach every encoding to the value of its name; axes then count from the front.

    Raises:
        EncodingsError: the model has no value of that name.
    """
    values = {str(value.name): value for value in _values(model.graph)}
    for encoding in (*encodings.activation_encodings, *encodings.param_encodings):
        if encoding.name not in values:
            raise EncodingsError(encoding.name, "the model has no such tensor")
        value = values[encoding.name]
        from_the_front = _from_the_front(encoding, value)
        _check_channels(from_the_front, value)
        set_encoding(value, from_the_front)


def collect(model: ir.Model) -> Encodings:
    """Return the encodings of all values of a model, under the current names of the values."""
    activations: list[Encoding] = []
    parameters: list[Encoding] = []
    for value in _values(model.graph):
        encoding = encoding_of(value)
        if encoding is not None:
            group = parameters if value.is_initializer() else activations
            group.append(encoding)
    return Encodings(activation_encodings=tuple(activations), param_encodings=tuple(parameters))


def encoding_of(value: ir.Value) -> Encoding | None:
    """Return the encoding of a value, under the value's own name, or None."""
    encoding = value.meta.get(_KEY)
    if not isinstance(encoding, Encoding):
        return None
    if encoding.name == value.name:
        return encoding
    return encoding.model_copy(update={"name": str(value.name)})


def set_encoding(value: ir.Value, encoding: Encoding | None) -> None:
    """Set the encoding of a value, under any name; None removes it."""
    if encoding is None:
        value.meta.pop(_KEY, None)
    else:
        value.meta[_KEY] = encoding


def inherit(value: ir.Value, source: ir.Value) -> ir.Value:
    """Copy the encoding of `source`, if it has one, to `value`, and return `value`."""
    encoding = encoding_of(source)
    if encoding is not None:
        set_encoding(value, encoding)
    return value


def _from_the_front(encoding: Encoding, value: ir.Value) -> Encoding:
    """Count axes from the front: files may count from the end, and passes drop axes of 1."""
    axes = {"axis": encoding.axis, "block_axis": encoding.block_axis}
    behind = {key: axis for key, axis in axes.items() if axis is not None and axis < 0}
    if not behind:
        return encoding
    rank = 0 if value.shape is None else len(value.shape)
    for key, axis in behind.items():
        if axis < -rank:
            raise EncodingsError(encoding.name, f"it has no {key} {axis}")
    return encoding.model_copy(update={key: axis + rank for key, axis in behind.items()})


def _check_channels(encoding: Encoding, value: ir.Value) -> None:
    """Check that a parameter has as many channels as its encoding has scales."""
    tensor = value.const_value
    if tensor is None or encoding.enc_type not in {"PER_CHANNEL", "LPBQ"} or not encoding.scale:
        return
    dims = [int(size) for size in tensor.shape.numpy()]
    axis, count = encoding.axis, len(encoding.scale)
    if axis is not None and axis >= len(dims):
        raise EncodingsError(encoding.name, f"it has no axis {axis}")
    if count not in (dims if axis is None else dims[axis : axis + 1]):
        place = "" if axis is None else f" along axis {axis}"
        raise EncodingsError(encoding.name, f"{count} scales{place} for a tensor of shape {dims}")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    outputs = (output for node in graph for output in node.outputs)
    yield from dict.fromkeys((*graph.inputs, *graph.initializers.values(), *outputs))
