"""Ranking of tensors and layers by the cost of their quantization."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import onnx_ir as ir

from buildlib.encodings.grid import weight_grid
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.files import tensor_array
from buildlib.graph.values import is_parameter, source_of, static_shape
from buildlib.numerics.divergence import Divergence, sqnr_db
from buildlib.quantize.calibration import masked_scores
from buildlib.quantize.grids import activation_names, channel_axis, shared_grids
from buildlib.quantize.sensitivity.sweep import (
    MeasuredVariant,
    Quantized,
    SensitivityModel,
    constant_names,
)

Granularity = Literal["tensor", "layer"]
UnitKind = Literal["weight", "key", "value", "residual", "activation", "constant"]
UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)
_RESIDUAL = re.compile(r"embedding(_scaled)?|layer_\d+_(attention_residual|output)")
KIND_PLURALS: Mapping[UnitKind, str] = {
    "weight": "weights", "key": "keys", "value": "values", "residual": "hidden states",
    "activation": "activations",
}  # fmt: skip
_OPTIONS: Mapping[UnitKind, tuple[str, int, int]] = {
    "weight": ("mixed_precision", 4, 8),
    "key": ("kv_bitwidth", 8, 16),
    "value": ("kv_bitwidth", 8, 16),
    "residual": ("activation_precision", 8, 16),
    "activation": ("activation_precision", 8, 16),
}
"""Option of quantization that gives tensors more bits; those that it takes, and then gives."""
_TENSOR_LIMIT = 200_000_000
"""Weights above which a model is ranked by layer unless asked: a tensor takes a pass."""


@dataclass(frozen=True)
class Unit:
    """Tensors that are quantized together, and can get more bits together.

    Attributes:
        name: of the weight; of the first value of a group that shares a grid; or of the layer.
        kind: weights of matrices; keys, values; what layers add up; other activations; or other
            constants (norms, tables).
        segment: the first segment that has it: 0 is the embedding, i + 1 layer i, then the head.
        encodings: of its tensors.
    """

    name: str
    kind: UnitKind
    segment: int
    encodings: Quantized

    @property
    def bits(self) -> int:
        """The lowest bits of its tensors."""
        return min(encoding.stored_bits for encoding in self.encodings.values())

    @property
    def remedy(self) -> str | None:
        """The option that gives it more bits, as `mixed_precision=8`; None if none does."""
        option, bits, more = _OPTIONS.get(self.kind, ("", 0, 0))
        return f"{option}={more}" if self.bits == bits else None


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
        granularity: whether a unit is a tensor, or all of a kind in a layer.
    """

    costs: tuple[UnitCost, ...]
    whole: Divergence
    granularity: Granularity


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
    """Measure the cost of quantizing each tensor, or each kind of tensor in each layer.

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
    units = [unit for unit in find_units(graphs, encodings) if unit.kind in kinds]
    if unit_size == "layer":
        units = _by_layer(units, len(graphs))
    noise = model.record(encodings) | _weight_noise(model, graphs, encodings)
    for name in (name for graph in graphs for name in masked_scores(graph)):
        noise.pop(name, None)  # hidden scores saturate, which changes nothing
    variants = model.measure([unit.encodings for unit in units] + [encodings], progress=progress)
    without: Sequence[MeasuredVariant | None] = [None] * len(units)
    if both_ways:
        partly_float = [{n: e for n, e in encodings.items() if n not in u.encodings} for u in units]
        without = model.measure(partly_float, encodings, progress)
    costs = [
        UnitCost(
            unit,
            min((noise[name] for name in unit.encodings if name in noise), default=None),
            one.output_sqnr_db,
            one.divergence,
            None if rest is None else rest.divergence,
        )
        for unit, one, rest in zip(units, variants, without, strict=False)
    ]
    costs.sort(key=lambda cost: -cost.alone.kl)
    return Sensitivity(tuple(costs), variants[-1].divergence, unit_size)


def find_units(graphs: Sequence[ir.Graph], encodings: Quantized) -> list[Unit]:
    """Return the units of a model: each weight, and each group of values that share a grid.

    Args:
        encodings: by name; values without one are in no unit.
    """
    units: dict[str, Unit] = {}
    for index, graph in enumerate(graphs):
        for unit in (*_weights(graph, index, encodings), *_activations(graph, index, encodings)):
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
    for name in _matrices(graph):
        if name in encodings and encodings[name].dtype == "INT":
            yield Unit(name, "weight", segment, {name: encodings[name]})


def _activations(graph: ir.Graph, segment: int, encodings: Quantized) -> Iterator[Unit]:
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
        own = {
            name: encodings[name]
            for name in sorted(names - {border} - set(matrices))
            if name in encodings and encodings[name].dtype == "INT"
        }
        grouped_names |= set(own)
        if own:
            largest = computed_names & own.keys() or own
            first = min(largest, key=lambda name: (-sizes.get(name, 0), name))
            kind = activation_kind(own) if computed_names & own.keys() else "constant"
            yield Unit(first, kind, segment, own)
    for name in sorted(constant_names(graph) - grouped_names):
        if name in encodings and encodings[name].dtype == "INT" and encodings[name].bw <= 16:
            yield Unit(name, "constant", segment, {name: encodings[name]})


def activation_kind(names: Iterable[str]) -> UnitKind:
    """Return the kind of values that share a grid."""
    for name in names:
        if interface.is_kv(name):
            return "key" if name.startswith("past_key") else "value"
        if _RESIDUAL.fullmatch(name):
            return "residual"
    return "activation"


def _by_layer(units: Sequence[Unit], n_segments: int) -> list[Unit]:
    """Join the units of a kind in a segment; constants are with the other activations."""
    groups: dict[tuple[int, UnitKind], list[Unit]] = {}
    for unit in units:
        kind: UnitKind = "activation" if unit.kind == "constant" else unit.kind
        groups.setdefault((unit.segment, kind), []).append(unit)
    return [
        Unit(
            f"{segment_name(segment, n_segments)} {KIND_PLURALS[kind]}",
            kind,
            segment,
            {name: encoding for unit in members for name, encoding in unit.encodings.items()},
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
