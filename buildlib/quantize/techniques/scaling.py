"""Exact rescaling: channels are divided where they are made, and multiplied where they are read.

A cache has one grid for all keys of a layer, and another for its values. A channel a hundred times
as large as the others leaves these a hundredth of the steps. So each channel of the keys is divided
by its largest absolute value over text, and the same channel of the queries multiplied with it;
values are divided in the rows that make them, and multiplied in the columns of the output
projection. The model computes the same, in the same nodes: what changes is rows and columns of
projections, their biases, and gains of norms of queries and keys.

Which channels meet is asked of the graph itself, by running the layout between the constants and
the caches on numbered channels. So channels that a rotary position turns against each other share a
factor, as do those that one gain of a norm scales in all heads, and query heads follow the key head
that they share.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.values import (
    PRODUCTS,
    is_linear,
    is_parameter,
    operand,
    source_of,
    static_shape,
)
from buildlib.numerics.runners import Arrays, OnnxRunner
from buildlib.numerics.segment_loop import SegmentLoop
from buildlib.passes.split import extract_nodes
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import RangeObserver
from buildlib.quantize.grids import channel_axis
from buildlib.quantize.recipe import matrix_uses, weight_format
from buildlib.quantize.techniques.base import Factors, FloatModel
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from buildlib.quantize.weight_grids import full_steps

Array = npt.NDArray[Any]

_NORMS = frozenset({"RMSNormalization", "LayerNormalization"})
_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Sub"})
_POWERS = (1.0, 0.75, 0.5, 0.25, 0.0)
_LEAST = 1e-4
"""Of the largest channel: smaller ones count as so large."""
_SAME_FACTOR = 1e-3
"""Relative difference of factors by the order of sums, and less than a step of a cache."""
_NONE = np.ones(1, np.float32)
"""The factors of what is not rescaled."""


def write_scaled(model: Path, factors: Factors, folder: Path) -> Path:
    """Write `model.onnx` with some constants multiplied; all others are linked as they are.

    Args:
        model: float.
        factors: of constants by name; those of caches, which change with them, are passed over.
        folder: as `WeightTechnique.optimize` takes it.
    """
    whole = load_model(model)
    names = [name for name in factors if not interface.is_kv(name)]
    stored = {name: whole.graph.initializers[name] for name in names}
    shapes = {name: static_shape(value) or () for name, value in stored.items()}
    with TensorWriter(folder / "scaled.safetensors", shapes) as file:
        for name, value in stored.items():
            values = np.asarray(constant_array(value), np.float32)
            file.write(name, values * factors[name])
        for name in stored:
            replace_constant(whole.graph, name, file.tensor(name))
    return save_model(whole, folder / MODEL_FILE)


def multiplied(*all_factors: Factors) -> dict[str, Array]:
    """Return the product of factors of the same constants."""
    product: dict[str, Array] = {}
    for factors in all_factors:
        for name, values in factors.items():
            product[name] = product[name] * values if name in product else values
    return product


def check_shared_factors(models: Mapping[str, Factors]) -> None:
    """Check that models that share caches have rescaled them alike.

    Args:
        models: their factors, by the name of the model in messages.
    """
    (first, reference), *others = models.items()
    for name, factors in others:
        for cache in filter(interface.is_kv, sorted(reference.keys() | factors.keys())):
            ours, theirs = reference.get(cache, _NONE), factors.get(cache, _NONE)
            if not np.allclose(ours, theirs, rtol=_SAME_FACTOR, atol=0.0):
                reason = f"{name} has rescaled it by other factors than {first}"
                remedy = "build both from the same weights, or with quantization.scaling=false"
                raise EncodingsError(cache, f"{reason}, and both feed one cache: {remedy}")


@dataclass(frozen=True)
class Scaling:
    """`WeightTechnique` that rescales the channels of caches between their constants.

    A layer stays as it is where a constant has an encoding or is read by others, too, or where
    something else than a layout stands between the constants and the caches. Activations that
    change lose their encodings.
    """

    name: str

    def optimize(
        self, model: FloatModel, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> FloatModel:
        """Write the rescaled model; the text runs once, and gives the ranges of all activations."""
        factors: list[Factors] = []
        changed: set[str] = set()
        ranges = RangeObserver()
        free = _free_constants(model)
        with SegmentLoop(model.path, model.config, model.token_windows) as loop:
            hidden = None
            for index in range(loop.n_segments):
                layer = _ScaledLayer(loop.segment(index), ranges, free, model.bits, folder)
                hidden = loop.run(index, hidden, on_outputs=layer.observe, change=layer.add_outputs)
                ranges.narrow()
                layer.choose()
                factors.append(layer.factors)
                changed |= layer.names
                if progress is not None:
                    progress(index + 1, loop.n_segments)
        path = write_scaled(model.path, multiplied(*factors), folder)
        given = model.encodings.activation_encodings
        left = tuple(encoding for encoding in given if encoding.name not in changed)
        encodings = model.encodings.model_copy(update={"activation_encodings": left})
        return replace(
            model.changed(path, encodings),
            ranges=ranges.ranges() if model.n_calibrating else None,
            factors=multiplied(model.factors, *factors),
        )


class _ScaledLayer:
    """A segment of a model while text runs through it: what its values reach, and then factors.

    Attributes:
        factors: of its constants and caches.
        names: of the activations that change.
    """

    def __init__(
        self,
        segment: ir.Model,
        ranges: RangeObserver,
        free: Collection[str],
        bits: Bitwidths,
        folder: Path,
    ) -> None:
        """Find what can be rescaled.

        Args:
            ranges: gets those of its activations; after `choose` those of the rescaled layer.
            free: names of the constants that may change.
            bits: of weights, and of keys and values.
            folder: for copies of layouts.
        """
        self._ranges = ranges
        self.factors: dict[str, Array] = {}
        self._uses = {use.name: use for use in matrix_uses(segment.graph)}
        self._bits = bits
        self._extremes: dict[str, tuple[Array, Array]] = {}
        self._squares: dict[str, Array] = {}
        exchanges = _exchanges(segment, folder)
        self._exchanges = [each for each in exchanges if each.constants.issubset(free)]
        self.names = {name for each in self._exchanges for name in each.names}
        self._attention = {each.attention for each in self._exchanges if each.attention}

    def add_outputs(self, segment: ir.Model) -> None:
        """Add ranges of all activations to the outputs of the segment, and what is rescaled."""
        graph = segment.graph
        outputs, names = set(graph.outputs), self.names | self._attention
        values = [value for node in graph for value in node.outputs]
        self._ranges.add_outputs(segment)
        graph.outputs.extend(v for v in values if v.name in names and v not in outputs)

    def observe(self, outputs: Arrays, n_tokens: int) -> None:
        """Take in the outputs of one call."""
        self._ranges.observe(outputs, n_tokens)
        for name in self.names:
            values = outputs[name]
            low, high = self._extremes.get(name, (values, values))
            self._extremes[name] = np.minimum(low, values), np.maximum(high, values)
        for exchange in self._exchanges:
            if exchange.attention is not None:
                read = str(exchange.read.value.name)
                spread = np.square(outputs[exchange.attention]).sum(axis=-1).mean()
                for name, square in (
                    (exchange.attention, spread),
                    (read, np.square(outputs[read]).mean(axis=0)),
                ):
                    self._squares[name] = self._squares.get(name, 0.0) + square

    def choose(self) -> None:
        """Choose factors, and rescale the ranges that were observed."""
        between: dict[str, Array] = {}
        for exchange in self._exchanges:
            low, high = self._extremes[exchange.cache]
            axis = interface.token_axis(exchange.cache)
            sizes = exchange.largest(np.maximum(-low, high).max(axis=axis, keepdims=True))
            if exchange.attention is not None:
                sizes = sizes ** self._best_power(exchange, sizes)
            constants, values = exchange.scaled(sizes)
            self.factors = multiplied(self.factors, constants)
            between = multiplied(between, values)
        for name, factor in between.items():
            low, high = self._extremes[name]
            self._ranges.low[name] = float((low * factor).min())
            self._ranges.high[name] = float((high * factor).max())

    def _best_power(self, exchange: "_Exchange", sizes: Array) -> float:
        """Return the power of the sizes of values at which output projections lose least.

        Equal values lose least in their cache, and most in the weights that they are multiplied
        with. Both errors are those of steps whose rounding is uniform; that of values is averaged
        by attention over tokens.
        """
        [name] = exchange.read.places
        weights = np.asarray(constant_array(self._uses[name].source), np.float32)
        if exchange.read.places[name][0] != 1:
            weights = weights.T
        fmt = weight_format(self._uses[name], self._bits)
        half = (1 << ((self._bits.kv_bitwidth or 8) - 1)) - 1
        squares = self._squares[str(exchange.read.value.name)]
        seen = self._squares[str(exchange.attention)] * np.square(weights).sum(axis=0)

        def error(power: float) -> float:
            factors = (sizes**power)[exchange.read_groups]
            step = float((sizes ** (1 - power))[exchange.cached].max()) / half
            steps = np.square(full_steps(weights * factors.astype(np.float32), fmt)).sum(axis=0)
            blocks = (squares / factors**2).reshape(len(steps), -1).sum(axis=1)
            return float((seen * np.square(step * factors)).sum() + steps @ blocks)

        return min(_POWERS, key=error)


@dataclass(frozen=True)
class Channels:
    """Constants that give each channel of a value a factor.

    Attributes:
        value: that they make, or that a product reads.
        shape: of its channels; it broadcasts to the value.
        places: shape in which each constant, by name, takes the factors of all channels.
    """

    value: ir.Value
    shape: tuple[int, ...]
    places: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """Number of channels."""
        return math.prod(self.shape)

    def scaled(self, factors: Array) -> dict[str, Array]:
        """Return the factors of the constants for those of the channels, `[size]`."""
        values = factors.astype(np.float32)
        return {name: values.reshape(place) for name, place in self.places.items()}

    @classmethod
    def making(cls, value: ir.Value) -> "Channels | None":
        """Return the channels of the nearest value above that constants give a scale."""
        while (node := value.producer()) is not None:
            given = [v for v in node.inputs if v is not None]
            constants = [v for v in given if is_parameter(v)]
            if node.op_type in PRODUCTS:
                size, axis = _outputs(node)
                return cls._of(node.outputs[0], constants, (size,), _along(axis, size))
            if node.op_type in _NORMS:
                return cls._of(node.outputs[0], constants, static_shape(constants[0]) or ())
            if any(_size(v) > 1 for v in constants) and node.op_type in _ELEMENTWISE:
                shape = static_shape(constants[0]) or ()
                return cls._of(node.outputs[0], constants, shape) if node.op_type == "Mul" else None
            data = [v for v in given if v not in constants and v.name not in interface.ROTATIONS]
            if not data:
                return None
            value = data[0]
        return None

    @classmethod
    def read_by(cls, node: ir.Node) -> "Channels | None":
        """Return the input channels of a product with a weight."""
        weight = operand(node, 1)
        outputs, axis = _outputs(node)
        size = _size(weight) // outputs
        return cls._of(operand(node, 0), [weight], (size,), _along(1 - axis, size))

    @classmethod
    def _of(
        cls,
        value: ir.Value,
        constants: Sequence[ir.Value],
        shape: tuple[int, ...],
        first: tuple[int, ...] | None = None,
    ) -> "Channels | None":
        """Return channels, if there are constants; `first` is the place of the first of them."""
        sources = [source_of(constant) for constant in constants]
        if not sources:
            return None
        places = dict.fromkeys((str(source.name) for source in sources), shape)
        return cls(value, shape, places | {str(sources[0].name): first or shape})


class _Layout:
    """Operators between channels and values behind them, which only move, turn and average."""

    def __init__(
        self, model: ir.Model, channels: Channels, ends: Sequence[ir.Value], folder: Path
    ) -> None:
        """Load the operators.

        Args:
            model: that has them.
            channels: whose value they begin with.
            ends: values on the way, each behind the one before.
            folder: for a copy of them.
        """
        start = channels.value
        nodes: set[ir.Node] = set()
        for before, end in zip((start, *ends), ends, strict=False):
            nodes |= _between(before, end)
        ordered = [node for node in model.graph if node in nodes]
        made = [value for node in ordered for value in node.outputs]
        read = dict.fromkeys(v for node in ordered for v in node.inputs if v is not None)
        self.channels, self.values = channels, (start, *made)
        self._inputs = [v for v in read if not is_parameter(v) and v not in made] or [start]
        self._runner = None
        if not all(map(_is_known, (v for v in self._inputs if v is not start))):
            raise _UnknownLayoutError
        if ordered:
            part = extract_nodes(model, ordered, self._inputs, made)
            path = save_model(part, folder / f"{start.name}.layout.onnx")
            self._runner = OnnxRunner(path, plain=True)
            path.unlink()

    def numbers(self, value: ir.Value) -> tuple[Array, Array]:
        """Return the numbers of the channels in a value: of the first in a sum, of the second."""
        shape = self.channels.shape
        numbers = np.arange(self.channels.size).reshape(shape)
        turns = ((1.0, 0.0), (0.0, 1.0))
        ones = [self._run(np.ones(shape), *turn)[str(value.name)] for turn in turns]
        found = [self._run(numbers + 1, *turn)[str(value.name)] for turn in turns]
        first, second = (
            np.rint(ids / one).astype(np.intp) - 1 for ids, one in zip(found, ones, strict=True)
        )
        return first, second

    def factors(self, factors: Array) -> dict[str, Array]:
        """Return what each value is multiplied with for factors of the channels, by name."""
        given = factors.reshape(self.channels.shape)
        ones, scaled = (self._run(each, 1.0, 2.0) for each in (np.ones_like(given), given))
        return {name: scaled[name] / value for name, value in ones.items()}

    def _run(self, channels: Array, cos: float, sin: float) -> dict[str, Array]:
        """Return all values by name; entries of a cache are the same, attention sees the last."""
        feeds: dict[str, Array] = {}
        for value in self._inputs:
            name, values = str(value.name), np.zeros(static_shape(value) or (), np.float32)
            if value is self.channels.value:
                values += channels
            elif name in interface.ROTATIONS:
                values += cos if name.endswith(interface.COS) else sin
            elif not interface.is_kv(name):
                values[..., -1] = 1.0
            feeds[name] = values
        start = str(self.channels.value.name)
        if self._runner is None:
            return feeds
        outputs = self._runner.run(feeds)
        for name in filter(interface.is_kv, feeds):
            entry = outputs[interface.kv_output(name)].take([0], interface.token_axis(name))
            feeds[name] = np.ascontiguousarray(np.broadcast_to(entry, feeds[name].shape))
        return {start: feeds[start], **self._runner.run(feeds)}


def _exchanges(segment: ir.Model, folder: Path) -> list["_Exchange"]:
    """Return the exchanges of the caches of a segment that can be rescaled."""
    found: list[_Exchange | None] = []
    for value in segment.graph.outputs:
        layer = interface.kv_layer(str(value.name))
        if layer is None:
            continue
        is_key = value.name == interface.past_key(layer, "out")
        exchange = _Exchange.of_keys if is_key else _Exchange.of_values
        try:
            found.append(exchange(segment, layer, folder))
        except _UnknownLayoutError:
            continue
    return [exchange for exchange in found if exchange is not None]


class _UnknownLayoutError(Exception):
    """Values flow together whose factors nobody knows."""


@dataclass(frozen=True)
class _Exchange:
    """Channels of a cache, between the constants that make them and those that read them.

    Attributes:
        cache: name of the new entries.
        made: layout from the channels that make them.
        read: channels that are multiplied where `made` is divided.
        queries: layout behind them, of an exchange of keys.
        attention: name of the weights of attention, of an exchange of values.
        made_groups: number of the factor of each channel of `made`.
        read_groups: the same of `read`.
        cached: the number of the factor of each channel of the cache, as it broadcasts to it.
    """

    cache: str
    made: _Layout
    read: Channels
    queries: _Layout | None
    attention: str | None
    made_groups: Array
    read_groups: Array
    cached: Array

    @classmethod
    def of_keys(cls, model: ir.Model, layer: int, folder: Path) -> "_Exchange | None":
        """Return the exchange of keys and queries of a layer."""
        new, joined, product = _attention(model, interface.past_key(layer, "out"))
        made = Channels.making(new)
        query = operand(product, 0)
        read = Channels.making(query)
        if made is None or read is None:
            return None
        made_layout = _Layout(model, made, [new, joined], folder)
        read_layout = _Layout(model, read, [query], folder)
        keys = [np.moveaxis(each, 3, 2)[:, :, :1] for each in made_layout.numbers(new)]
        queries = [each[:, :, :1] for each in read_layout.numbers(query)]
        pairs = [(keys[0], queries[0]), (keys[1], queries[0]), (keys[0], queries[1])]
        cached = np.moveaxis(keys[0], 2, 3)
        layouts = (made_layout, read, read_layout, None)
        return cls(str(new.name), *layouts, *_groups(made, read, pairs, cached))

    @classmethod
    def of_values(cls, model: ir.Model, layer: int, folder: Path) -> "_Exchange | None":
        """Return the exchange of values and the output projection of a layer."""
        new, joined, product = _attention(model, interface.past_value(layer, "out"))
        projection = _product_behind(joined)
        made, read = Channels.making(new), None
        if projection is not None:
            read = Channels.read_by(projection)
        if made is None or read is None:
            return None
        made_layout = _Layout(model, made, [new, joined, read.value], folder)
        at_end, _ = made_layout.numbers(read.value)
        pairs = [(at_end[:1], np.arange(read.size))]
        values, _ = made_layout.numbers(new)
        layouts = (made_layout, read, None, str(operand(product, 0).name))
        cached = values[:, :, :1]
        return cls(str(new.name), *layouts, *_groups(made, read, pairs, cached))

    @property
    def constants(self) -> set[str]:
        """Names of the constants that it changes."""
        return {*self.made.channels.places, *self.read.places}

    @property
    def names(self) -> set[str]:
        """Names of the activations that it changes."""
        layouts = [self.made, *([self.queries] if self.queries else [])]
        return {str(value.name) for each in layouts for value in each.values}

    def scaled(self, sizes: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Divide each group by a size; return factors of constants, and of values between.

        Those of constants have the factors of the cache, by its name, among them.
        """
        factors = np.ones_like(sizes)
        cached = np.unique(self.cached)
        factors[cached] = sizes[cached] / np.exp(np.log(sizes[self.cached]).mean())
        made, read = 1 / factors[self.made_groups], factors[self.read_groups]
        constants = multiplied(
            self.made.channels.scaled(made),
            self.read.scaled(read),
            {self.cache: (1 / factors[self.cached]).astype(np.float32)},
        )
        values = self.made.factors(made)
        return constants, multiplied(values, self.queries.factors(read) if self.queries else {})

    def largest(self, sizes: Array) -> Array:
        """Return the largest of sizes, one for each channel of the cache, in each group."""
        found = np.zeros(1 + max(self.made_groups.max(), self.read_groups.max()))
        np.maximum.at(found, self.cached, sizes)
        return np.maximum(found, _LEAST * found.max() or 1.0)


def _groups(
    made: Channels, read: Channels, pairs: Iterable[tuple[Array, Array]], cached: Array
) -> tuple[Array, Array, Array]:
    """Return the groups of channels with one factor: of those made, read, and of the cache.

    Args:
        pairs: numbers of channels made and read that meet; they broadcast to each other.
        cached: numbers of channels made, in the cache.
    """
    links = [np.broadcast_arrays(*pair) for pair in pairs]
    rows, columns = (np.concatenate([each[side].reshape(-1) for each in links]) for side in (0, 1))
    columns = made.size + columns
    least, before = np.arange(made.size + read.size), np.empty(0, np.intp)
    while not np.array_equal(least, before):  # the least channel that each has met so far
        before = least.copy()
        np.minimum.at(least, rows, least[columns])
        np.minimum.at(least, columns, least[rows])
    _, groups = np.unique(least, return_inverse=True)
    return groups[: made.size], groups[made.size :], groups[cached]


def _attention(model: ir.Model, name: str) -> tuple[ir.Value, ir.Value, ir.Node]:
    """Return a layer's new keys or values, those joined with the past, and their product."""
    new = next(value for value in model.graph.outputs if value.name == name)
    joined = next(node for node, _ in new.uses() if node.op_type == "Concat").outputs[0]
    product = next(node for node, _ in joined.uses() if node.op_type == "MatMul")
    return new, joined, product


def _product_behind(value: ir.Value) -> ir.Node | None:
    """Return the product with a weight that alone reads what attention makes of values."""
    while len(uses := value.uses()) == 1:
        (node, _), *_ = uses
        if is_linear(node):
            return node
        value = node.outputs[0]
    return None


def _between(start: ir.Value, end: ir.Value) -> set[ir.Node]:
    """Return the nodes on all ways from one value to another."""
    reached, todo = {start}, [start]
    while todo:
        new = {v for node, _ in todo.pop().uses() for v in node.outputs} - reached
        reached |= new
        todo += new
    ways: set[ir.Node] = set()
    todo = [end] if end is not start and end in reached else []
    while todo:
        node = todo.pop().producer()
        if node is not None and node not in ways:
            ways.add(node)
            todo += [v for v in node.inputs if v is not None and v is not start and v in reached]
    return ways


def _is_known(value: ir.Value) -> bool:
    """Return whether a value beside the channels is a rotation, a cache, or attention weights."""
    node, name = value.producer(), str(value.name)
    return name in interface.ROTATIONS or interface.is_kv(name) or _op_type(node) == "Softmax"


def _op_type(node: ir.Node | None) -> str | None:
    return None if node is None else node.op_type


def constant_array(value: ir.Value) -> Array:
    """Return the values of an initializer."""
    assert value.const_value is not None  # noqa: S101  (an initializer)
    return tensor_array(value.const_value)


def _size(constant: ir.Value) -> int:
    return math.prod(static_shape(source_of(constant)) or (1,))


def _outputs(node: ir.Node) -> tuple[int, int]:
    """Return the number of outputs of a product, and their axis in its weight."""
    axis = channel_axis(node, 1) or 0
    return (static_shape(source_of(operand(node, 1))) or (1, 1))[axis], axis


def _along(axis: int, size: int) -> tuple[int, ...]:
    return (size, 1) if axis == 0 else (1, size)


def _free_constants(model: FloatModel) -> set[str]:
    """Return the names of constants that one node alone reads, and that have no encoding."""
    encoded, graph = model.encodings.by_name(), load_model(model.path).graph
    return {
        name
        for name, value in graph.initializers.items()
        if name not in encoded and _has_one_reader(value)
    }


def _has_one_reader(source: ir.Value) -> bool:
    uses = list(source.uses())
    if len(uses) != 1:
        return False
    node = uses[0].node
    return node.op_type != "Cast" or _has_one_reader(node.outputs[0])
