"""Massive channels of the residual stream split into copies: the model computes the same.

Norms behind attention and MLP, as Gemma has them, have gains of hundreds in a few channels, beside
medians of a few. Each token then carries numbers a thousand times as large as its others, and the
first one 100,000, which 16 bits hold beside the others on a few steps. As much depends on them,
none can be cut off. So a channel x becomes n channels of x / sqrt(n) each, in all weights that make
or read the stream: sums of squares stay as they were, so norms do too. What the gain of a norm can
take, of the share of a copy, weights do not: their steps would be coarser for it.

Splitting of outlier channels is from Zhao et al., "Improving Neural Network Quantization without
Retraining using Outlier Channel Splitting", 2019 (arXiv 1901.09504), where copies are halves.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.errors import InvalidOptionError
from buildlib.graph.files import load_model, save_model
from buildlib.graph.values import is_linear, is_parameter, operand, source_of, static_shape
from buildlib.quantize.grids import channel_axis
from buildlib.quantize.techniques.rotation import is_scaling
from buildlib.quantize.techniques.scaling import constant_array
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant

Array = npt.NDArray[Any]
Copies = Mapping[int, int]
"""Number of copies of a channel, by its index."""

SPLIT = "qnnfarm.split"
"""Property of a model with split channels: `163:14 400:20`, channels and their copies."""
_MASSIVE = 64.0
"""Gain of a channel, over the median of its norm, from which on it is split."""
_WIDER = 1 / 20
_STEP = 32
"""Channels are added in such steps, as blocks of weights (LPBQ) have that many."""
_CHUNK_ROWS = 4096
_LAYOUT = frozenset({"Identity", "Reshape"})


def find_massive(path: Path) -> Copies:
    """Return the channels of a whole float model that gains make massive, with their copies."""
    model = load_model(path)
    try:
        stream = _Stream(model.graph)
    except _NotSplittableError:
        return {}
    sizes = np.zeros(stream.width)
    for gain in stream.added_gains:
        values = np.abs(constant_array(gain))
        sizes = np.maximum(sizes, values / max(float(np.median(values)), 1e-30))
    massive = [int(channel) for channel in np.flatnonzero(sizes >= _MASSIVE)]
    copies = dict.fromkeys(massive, 1)
    for _ in range(_STEP * math.ceil(stream.width * _WIDER / _STEP) if massive else 0):
        copies[max(massive, key=lambda one: sizes[one] / math.sqrt(copies[one]))] += 1
    return {channel: count for channel, count in copies.items() if count > 1}


def split_of(path: Path) -> Copies:
    """Return the channels that a model has split; none where it has the width of its source."""
    text = load_model(path).metadata_props.get(SPLIT, "")
    pairs = (one.split(":") for one in text.split())
    return {int(channel): int(count) for channel, count in pairs}


def write_split(path: Path, copies: Copies, folder: Path) -> Path:
    """Write `model.onnx` with channels split; constants without them are linked as they are.

    Args:
        path: a whole float model, in canonical form.
        folder: as `WeightTechnique.optimize` takes it.

    Raises:
        InvalidOptionError: something reads the residual stream whose channels nobody knows.
    """
    model = load_model(path)
    try:
        stream = _Stream(model.graph)
    except _NotSplittableError as error:
        reason = f"channels cannot be split: {error}"
        raise InvalidOptionError("quantization.spreading", reason, ()) from error
    channels = np.arange(stream.width)
    source = np.concatenate([channels, *(np.full(n - 1, c) for c, n in copies.items())])
    share = np.array([1 / math.sqrt(copies.get(int(channel), 1)) for channel in source])
    change = _Change(source, share, math.sqrt(stream.width / len(source)))
    shapes = {name: change.shape(place) for name, place in stream.places.items()}
    with TensorWriter(folder / "split.safetensors", shapes) as file:
        for name, place in stream.places.items():
            for start, rows in change.rows(place):
                file.write(name, rows, start)
        for name in shapes:
            replace_constant(model.graph, name, file.tensor(name))
    stream.widen(len(source))
    model.metadata_props[SPLIT] = " ".join(f"{c}:{n}" for c, n in copies.items())
    return save_model(model, folder / MODEL_FILE)


@dataclass(frozen=True)
class _Place:
    """A constant that has the channels of the stream along an axis.

    Attributes:
        axis: of the channels.
        shared: copies get their share of the channel, and not all of it.
        gain: it is that of a norm.
    """

    source: ir.Value
    axis: int
    shared: bool = True
    gain: bool = False


@dataclass(frozen=True)
class _Change:
    """The change of every such constant.

    Attributes:
        channels: that each new channel is a copy of.
        share: of its channel that each has, whose squares add up to 1.
        gain: factor of all gains, since a norm divides by the mean over more channels.
    """

    channels: Array
    share: Array
    gain: float

    def shape(self, place: _Place) -> tuple[int, ...]:
        dims = list(static_shape(place.source) or ())
        dims[place.axis] = len(self.channels)
        return tuple(dims)

    def rows(self, place: _Place) -> Iterator[tuple[int, Array]]:
        """Yield the new values as stored, some rows at a time."""
        values = constant_array(place.source)
        share = self.share if place.shared else np.ones_like(self.share)
        if place.axis == 0:
            factor = share.reshape(-1, *[1] * (values.ndim - 1)) * (self.gain if place.gain else 1)
            yield 0, values[self.channels] * factor
        else:
            for start in range(0, len(values), _CHUNK_ROWS):
                yield start, values[start : start + _CHUNK_ROWS][:, self.channels] * share


class _NotSplittableError(Exception):
    """Says what reads or makes the stream in a way that is not known."""


@dataclass
class _Stream:
    """All values that have the channels of the residual stream, and the constants that have them.

    Attributes:
        places: by the name of the constant.
        added_gains: of norms whose values are added to the stream.
    """

    graph: ir.Graph
    width: int = 0
    places: dict[str, _Place] = field(default_factory=dict)
    added_gains: list[ir.Value] = field(default_factory=list)
    _values: dict[ir.Value, None] = field(default_factory=dict)
    _read: set[ir.Value] = field(default_factory=set)
    """Of the values those that products alone read, behind a norm that has shared them again."""
    _norms: dict[ir.Node, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = next((node for node in self.graph if node.op_type == "Gather"), None)
        if table is None or not is_parameter(operand(table, 0)):
            raise _NotSplittableError("the model looks up no tokens in a table")
        self.width = (static_shape(table.outputs[0]) or (0,))[-1]
        todo = [table.outputs[0]]
        while todo:
            value = todo.pop()
            if value in self._values or is_parameter(value):
                continue
            self._values[value] = None
            if value.is_graph_output() or (static_shape(value) or (0,))[-1] != self.width:
                raise _NotSplittableError(f"{value.name} is more than a value of the stream")
            todo += self._made_of(value)
            for node, index in value.uses():
                todo += self._read_by(node, index)

    def widen(self, width: int) -> None:
        """Give all values another width, and norms the epsilon that it takes, in place."""
        for node in self._norms:
            old = node.attributes["epsilon"].as_float()
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", old * self.width / width)
        for value in self._values:
            dims = static_shape(value) or ()
            value.shape = ir.Shape((*dims[:-1], width))
            maker = value.producer()
            if maker is not None and maker.op_type == "Reshape":
                maker.replace_input_with(1, self._shape(operand(maker, 1), width))

    def _shape(self, old: ir.Value, width: int) -> ir.Value:
        dims = constant_array(old).copy()
        if dims[-1] < 0:
            return old
        dims[-1] = width
        name = f"{old.name}_of_{width}"
        if name not in self.graph.initializers:
            new = ir.val(name, const_value=ir.tensor(dims, name=name))
            self.graph.register_initializer(new)
        return self.graph.initializers[name]

    def _made_of(self, value: ir.Value) -> list[ir.Value]:
        """Take the node that makes a value, and return its inputs that have the channels."""
        node = value.producer()
        if node is None:
            raise _NotSplittableError(f"{value.name} is an input")
        data = [one for one in node.inputs if one is not None and not is_parameter(one)]
        if node.op_type == "Gather":
            self._place(operand(node, 0), 1)
            return []
        if is_linear(node):
            self._place(operand(node, 1), channel_axis(node, 1) or 0)
            for bias in node.inputs[2:]:
                if bias is not None:
                    self._place(bias, 0)
            return []
        return data if self._passes(node) else self._refuse(node)

    def _read_by(self, node: ir.Node, index: int) -> list[ir.Value]:
        """Take a node that reads a value, and return its outputs that have the channels."""
        if _is_product(node, index) and operand(node, 0) in self._read:
            self._place(operand(node, 1), 1 - (channel_axis(node, 1) or 0), shared=False)
            return []
        return list(node.outputs) if self._passes(node) else self._refuse(node)

    def _passes(self, node: ir.Node) -> bool:
        """Return whether a node's output has the channels that its inputs have."""
        if node.op_type == "RMSNormalization" and is_parameter(operand(node, 1)):
            read = _is_read(node.outputs[0])
            self._place(operand(node, 1), 0, shared=read, gain=True)
            if read:
                self._read.add(node.outputs[0])
            elif node not in self._norms:
                self.added_gains.append(source_of(operand(node, 1)))
            self._norms[node] = None
            return True
        if _keeps_channels(node):
            if any(value in self._read for value in node.inputs):
                self._read.add(node.outputs[0])
            return True
        inputs = [one for one in node.inputs if one is not None]
        return node.op_type == "Add" and not any(map(is_parameter, inputs))

    def _place(
        self, constant: ir.Value, axis: int, *, shared: bool = True, gain: bool = False
    ) -> None:
        source = source_of(constant)
        place = _Place(source, axis, shared, gain)
        if self.places.setdefault(str(source.name), place) != place:
            raise _NotSplittableError(f"{source.name} is read in two ways")
        if (static_shape(source) or (0,) * (axis + 1))[axis] != self.width:
            raise _NotSplittableError(f"{source.name} has other channels")

    def _refuse(self, node: ir.Node) -> list[ir.Value]:
        raise _NotSplittableError(f"{node.name} ({node.op_type}) reads or makes the stream")


def _is_product(node: ir.Node, index: int) -> bool:
    """Return whether a node multiplies its input with a weight."""
    return is_linear(node) and index == 0


def _keeps_channels(node: ir.Node) -> bool:
    """Return whether a node moves channels, or scales all alike."""
    return node.op_type in _LAYOUT or is_scaling(node)


def _is_read(value: ir.Value) -> bool:
    """Return whether nothing but products reads a value, in whatever layout."""
    return all(
        _is_product(node, index) or (_keeps_channels(node) and _is_read(node.outputs[0]))
        for node, index in value.uses()
    )
