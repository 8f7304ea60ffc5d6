"""Ranking of tensors and layers by the cost of their quantization."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from buildlib.encodings.grid import activation_grid, weight_grid
from buildlib.encodings.model import Encoding, asymmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.files import tensor_array
from buildlib.graph.values import is_parameter, source_of, static_shape
from buildlib.numerics.divergence import Divergence, sqnr_db
from buildlib.quantize.grids import activation_names, channel_axis, shared_grids
from buildlib.quantize.mixed_precision.sweep import (
    MeasuredVariant,
    Quantized,
    SensitivityModel,
    constant_names,
)
from buildlib.quantize.weight_grids import per_channel_encoding

Granularity = Literal["tensor", "layer"]
UnitKind = Literal["weight", "activation", "constant"]
UNIT_KINDS: tuple[UnitKind, ...] = ("weight", "activation", "constant")
_TENSOR_LIMIT = 200_000_000
"""Weights above which a model is ranked by layer unless asked: a tensor takes a pass."""


@dataclass(frozen=True)
class Unit:
    """Tensors that are quantized together, and can get more bits together.

    Attributes:
        name: of the weight; of the first value of a group that shares a grid; or of the layer.
        kind: weights of matrices; activations; or other constants (norms, tables).
        segment: the first segment that has it: 0 is the embedding, i + 1 layer i, then the head.
        low: encodings of its tensors.
        high: encodings with twice the bits; empty where there are none: caches have 8 bits, and
            weights of 8 and activations of 16 get no more.
        bytes_more: bytes that a decode step reads more with `high`: for a weight those that the
            container grows by; for an activation those of one token.
    """

    name: str
    kind: UnitKind
    segment: int
    low: Quantized
    high: Quantized
    bytes_more: int

    @property
    def bits(self) -> int:
        """The lowest bits of its tensors."""
        return min(encoding.stored_bits for encoding in self.low.values())


@dataclass(frozen=True)
class UnitCost:
    """Cost of quantizing a unit.

    Attributes:
        sqnr_db: 10 log10(sum(x^2) / sum((x - q(x))^2)), the lowest of its weights and activations;
            infinite if nothing is lost, None of other constants.
        output_sqnr_db: the same over the hidden states after its layer, all else being in float;
            None in the head.
        alone: divergence from float with only this quantized.
        rest: divergence with all quantized but this; None if not measured.
    """

    unit: Unit
    sqnr_db: float | None
    output_sqnr_db: float | None
    alone: Divergence
    rest: Divergence | None = None


@dataclass(frozen=True)
class Sensitivity:
    """Costs of all units, the greatest first, by the KL divergence of the unit alone.

    Attributes:
        whole: divergence of the model with all of them quantized.
        granularity: whether a unit is a tensor or a layer.
        encodings: of the whole model.
    """

    costs: tuple[UnitCost, ...]
    whole: Divergence
    granularity: Granularity
    encodings: Quantized


Progress = Callable[[int, int], None]


def rank_tensors(
    model: SensitivityModel,
    encodings: Quantized,
    *,
    granularity: Granularity | None = None,
    kinds: Collection[UnitKind] = UNIT_KINDS,
    both_ways: bool = False,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the cost of quantizing each tensor, or each layer.

    Each is quantized alone, with all else in float; logits and the layer's output are compared
    with those of the model in float.

    Args:
        model: float model and windows of text.
        granularity: by default tensors, and layers for models of more than 200 million weights.
        both_ways: measure too the gain if only one is left in float.
        progress: called with (segments run, such in all).
    """
    graphs = [model.graph(index) for index in range(len(model.names))]
    unit_size = granularity or ("tensor" if _weights_of(graphs) <= _TENSOR_LIMIT else "layer")
    units = [unit for unit in find_units(graphs, encodings, model.ar) if unit.kind in kinds]
    if unit_size == "layer":
        units = _by_layer(units, len(graphs))
    noise = model.record(encodings) | _weight_noise(model, graphs, encodings)
    variants = model.measure([unit.low for unit in units] + [encodings], progress=progress)
    without: Sequence[MeasuredVariant | None] = [None] * len(units)
    if both_ways:
        partly_float = [{n: e for n, e in encodings.items() if n not in u.low} for u in units]
        without = model.measure(partly_float, encodings, progress)
    costs = [
        UnitCost(
            unit,
            min((noise[name] for name in unit.low if name in noise), default=None),
            one.output_sqnr_db,
            one.divergence,
            None if rest is None else rest.divergence,
        )
        for unit, one, rest in zip(units, variants, without, strict=False)
    ]
    costs.sort(key=lambda cost: -cost.alone.kl)
    return Sensitivity(tuple(costs), variants[-1].divergence, unit_size, encodings)


def find_units(graphs: Sequence[ir.Graph], encodings: Quantized, ar: int) -> list[Unit]:
    """Return the units of a model: each weight, and each group of values that share a grid.

    Args:
        encodings: by name; values without one are in no unit.
    """
    units: dict[str, Unit] = {}
    for index, graph in enumerate(graphs):
        for unit in (
            *_weights(graph, index, encodings),
            *_activations(graph, index, encodings, ar),
        ):
            units.setdefault(unit.name, unit)
    return list(units.values())


def _matrices(graph: ir.Graph) -> dict[str, tuple[ir.Value, int]]:
    """Return the weights of matrices, each with the axis of its channels."""
    matrices = {}
    for node in graph:
        axis = channel_axis(node, 1) if len(node.inputs) > 1 else None
        value = node.inputs[1] if axis is not None else None
        if axis is not None and value is not None and is_parameter(value):
            matrices[str(source_of(value).name)] = (source_of(value), axis)
    return matrices


def _weights(graph: ir.Graph, segment: int, encodings: Quantized) -> Iterator[Unit]:
    for name, (value, axis) in _matrices(graph).items():
        encoding = encodings.get(name)
        if encoding is None or encoding.dtype != "INT" or value.const_value is None:
            continue
        high: dict[str, Encoding] = {}
        bits = encoding.stored_bits
        if bits == 4:
            array = tensor_array(value.const_value)
            high = {name: per_channel_encoding(name, array, axis, 8)}
        more = math.prod(static_shape(value) or ()) * bits // 8 if high else 0
        yield Unit(name, "weight", segment, {name: encoding}, high, more)


def _activations(graph: ir.Graph, segment: int, encodings: Quantized, ar: int) -> Iterator[Unit]:
    """Yield groups of values on one grid; a constant that lies on one belongs to the group."""
    border = str(graph.inputs[0].name) if segment else None
    sizes = {
        str(value.name): math.prod(static_shape(value) or ())
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs))
    }
    computed_names = set(activation_names(graph))
    matrices = _matrices(graph)
    grouped_names: set[str] = set(matrices)
    for names in shared_grids(graph):
        low = {
            name: encodings[name]
            for name in sorted(names - {border} - set(matrices))
            if name in encodings and encodings[name].dtype == "INT"
        }
        grouped_names |= set(low)
        if not low:
            continue
        kind: UnitKind = "activation" if computed_names & low.keys() else "constant"
        cache = any(map(interface.is_kv, low))
        high = {} if cache else {n: e for n, one in low.items() if (e := _raised(one)) is not None}
        first = min(
            computed_names & low.keys() or low, key=lambda name: (-sizes.get(name, 0), name)
        )
        more = sizes.get(first, 0) // ar if high else 0
        yield Unit(first, kind, segment, low, high, more)
    for name in sorted(constant_names(graph) - grouped_names):
        if name in encodings and encodings[name].dtype == "INT" and encodings[name].bw <= 16:
            high_one = _raised(encodings[name])
            high = {} if high_one is None else {name: high_one}
            yield Unit(name, "constant", segment, {name: encodings[name]}, high, 0)


def _raised(encoding: Encoding) -> Encoding | None:
    """Return an 8-bit grid's range on 16 bits."""
    if encoding.enc_type != "PER_TENSOR" or encoding.bw != 8:
        return None
    return asymmetric_encoding(encoding.name, *activation_grid(encoding).ends, 16)


def _by_layer(units: Sequence[Unit], n_segments: int) -> list[Unit]:
    """Join units: all weights of a segment, and all its other values."""
    groups: dict[tuple[int, str], list[Unit]] = {}
    for unit in units:
        kind = "weights" if unit.kind == "weight" else "activations"
        groups.setdefault((unit.segment, kind), []).append(unit)
    return [
        Unit(
            f"{segment_name(segment, n_segments)} {kind}",
            "weight" if kind == "weights" else "activation",
            segment,
            {name: encoding for unit in members for name, encoding in unit.low.items()},
            {name: encoding for unit in members for name, encoding in unit.high.items()},
            sum(unit.bytes_more for unit in members),
        )
        for (segment, kind), members in groups.items()
    ]


def segment_name(segment: int, n_segments: int) -> str:
    """Name a segment: `embedding`, `layer 3`, `head`."""
    if segment == 0:
        return "embedding"
    return "head" if segment == n_segments - 1 else f"layer {segment - 1}"


def _weights_of(graphs: Sequence[ir.Graph]) -> int:
    return sum(
        math.prod(static_shape(value) or ())
        for graph in graphs
        for value, _ in _matrices(graph).values()
    )


def _weight_noise(
    model: SensitivityModel, graphs: Sequence[ir.Graph], encodings: Quantized
) -> dict[str, float]:
    """Return the SQNR in dB of each weight of a matrix, against that of the float model."""
    noise = {}
    for graph in graphs:
        for name, (value, axis) in _matrices(graph).items():
            if name not in encodings or encodings[name].dtype != "INT" or value.const_value is None:
                continue
            array, grid = tensor_array(value.const_value), weight_grid(encodings[name])
            new_tensor = model.weight(name, encodings)
            reference = array if new_tensor is None else tensor_array(new_tensor)
            try:
                quantized_values = grid.dequantize(grid.quantize(reference, axis), axis)
            except ValueError as error:
                raise EncodingsError(name, str(error)) from error
            noise[name] = sqnr_db(array, quantized_values)
    return noise
