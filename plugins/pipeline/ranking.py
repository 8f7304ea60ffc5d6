"""Ranking of tensors and layers by the cost of their quantization."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import Grid, weight_grid
from buildlib.errors import BuildError, EncodingsError
from buildlib.graph import interface
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.values import static_shape
from buildlib.numerics.divergence import Divergence, decibels, sqnr_db
from buildlib.numerics.runners import Arrays
from buildlib.quantize.calibration import masked_scores
from buildlib.quantize.loss import KIND_PLURALS, UNIT_KINDS, Unit, UnitKind, find_units
from buildlib.quantize.recipe import matrix_uses
from buildlib.quantize.tensor_writer import replace_constant
from buildlib.quantize.variants import MeasuredVariant, Quantized, VariantModel, activation_grids

_SEEN = "__seen"
Granularity = Literal["tensor", "layer"]
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

    @property
    def bits(self) -> int:
        """The lowest bits of its tensors."""
        return min(encoding.stored_bits for encoding in self.unit.encodings.values())

    @property
    def remedy(self) -> str | None:
        """The option that gives it more bits, as `mixed_precision=8`; None if none does."""
        option, bits, more = _OPTIONS.get(self.unit.kind, ("", 0, 0))
        return f"{option}={more}" if self.bits == bits else None


def changed_weights(float_model: Path, quantized: Path) -> dict[str, ir.TensorProtocol]:
    """Return the weights that a technique has changed, of two canonical models of one shape.

    Raises:
        BuildError: other constants differ too, as they do where one of them was rotated.
        ModelFileError: a model cannot be read.
    """
    ours, theirs = (load_model(path).graph for path in (float_model, quantized))
    matrices = {use.name for use in matrix_uses(ours)}
    weights = {}
    for name, value in theirs.initializers.items():
        own = ours.initializers.get(name)
        if own is None or own.const_value is None or value.const_value is None:
            continue
        if _same(own.const_value, value.const_value):
            continue
        if name not in matrices:
            raise BuildError(
                f"{name} is not that of the model in float: something else has changed the "
                "model, and costs of single weights mean nothing then"
            )
        weights[name] = value.const_value
    return weights


def _same(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    if isinstance(one, ir.ExternalTensor) and isinstance(other, ir.ExternalTensor):
        places = [(tensor.offset, Path(tensor.path)) for tensor in (one, other)]
        if places[0][0] == places[1][0] and places[0][1].samefile(places[1][1]):
            return True
    return one.shape == other.shape and np.array_equal(tensor_array(one), tensor_array(other))


class RankedModel(VariantModel):
    """A whole float model, some weights of which a technique has changed.

    Args:
        changed: weights that the quantized model has in place of the float ones, by
            `changed_weights`; a variant has them where it has the encodings that go with them.
    """

    def __init__(
        self,
        model_path: Path,
        config: DecoderConfig,
        windows: Sequence[Sequence[int]],
        changed: Mapping[str, ir.TensorProtocol] | None = None,
    ) -> None:
        self._changed_weights = dict(changed or {})
        self._own: Quantized = {}
        super().__init__(model_path, config, windows)

    def change_weights(self, graph: ir.Graph, encodings: Quantized) -> None:
        """See `VariantModel.change_weights`."""
        for name, tensor in self._changed_weights.items():
            if name in encodings and encodings[name] is self._own.get(name):
                replace_constant(graph, name, tensor)

    def weight(self, name: str, encodings: Quantized) -> ir.TensorProtocol | None:
        """Return the weight that a variant with these encodings has; None for the float one."""
        return self._changed_weights.get(name) if name in encodings else None

    def record_noise(self, encodings: Quantized) -> dict[str, float]:
        """Run the model in float, and keep its logits as the reference of all variants.

        Returns:
            SQNR in dB of each activation with an encoding: 10 log10(sum(x^2) / sum((x - q(x))^2)).
        """
        self._own = encodings
        sums: dict[str, tuple[float, float]] = {}
        self.reference.restart()
        hidden = None
        for index in range(self.loop.n_segments):
            own = {name: encodings[name] for name in self.names[index] if name in encodings}
            grids = activation_grids(self.graph(index), own)

            def see(outputs: Arrays, n_tokens: int, grids: Mapping[str, Grid] = grids) -> None:
                for name, grid in grids.items():
                    array = outputs[f"{name}{_SEEN}"]
                    error = array - grid.dequantize(grid.quantize(array))
                    signal, noise = sums.get(name, (0.0, 0.0))
                    sums[name] = (signal + _squares(array), noise + _squares(error))
                if interface.LOGITS in outputs:
                    self.reference.record(outputs[interface.LOGITS][0, :n_tokens])

            def observe(model: ir.Model, names: Collection[str] = grids.keys()) -> None:
                values = [*model.graph.inputs, *(o for node in model.graph for o in node.outputs)]
                for value in values:
                    if value.name in names:
                        seen = ir.val(f"{value.name}{_SEEN}", value.dtype, value.shape)
                        model.graph.append(ir.node("Identity", [value], outputs=[seen]))
                        model.graph.outputs.append(seen)

            hidden = self.loop.run(index, hidden, on_outputs=see, change=observe)
        return {name: decibels(signal, noise) for name, (signal, noise) in sums.items()}


def _squares(array: npt.NDArray[Any]) -> float:
    return float(np.square(array, dtype=np.float64).sum())


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
    model: RankedModel,
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
    noise = model.record_noise(encodings) | _weight_noise(model, graphs, encodings)
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
        math.prod(static_shape(source) or ())
        for graph in graphs
        for source in {use.source for use in matrix_uses(graph)}
    )


def _weight_noise(
    model: RankedModel, graphs: Sequence[ir.Graph], encodings: Quantized
) -> dict[str, float]:
    """Return the SQNR in dB of each weight of a matrix, against that of the float model."""
    noise = {}
    for graph in graphs:
        for use in matrix_uses(graph):
            name, stored, axis = use.name, use.source.const_value, use.axis
            if name not in encodings or encodings[name].dtype != "INT" or stored is None:
                continue
            array, grid = tensor_array(stored), weight_grid(encodings[name])
            new_tensor = model.weight(name, encodings)
            reference = array if new_tensor is None else tensor_array(new_tensor)
            try:
                quantized_values = grid.dequantize(grid.quantize(reference, axis), axis)
            except ValueError as error:
                raise EncodingsError(name, str(error)) from error
            noise[name] = sqnr_db(array, quantized_values)
    return noise
