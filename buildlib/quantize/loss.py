"""The loss of a whole quantization on its calibration text, and what its bits do not hold.

The model in float and the quantized one, as QDQ on the CPU, read the same few windows of text. Only
where they differ by more than a little, the kinds of tensors are quantized one by one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.closeable import Closeable
from buildlib.container.manifest import LossRecord
from buildlib.encodings.model import Encoding, Encodings, symmetric_encoding
from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.values import static_shape
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.runners import Arrays
from buildlib.quantize.grids import activation_names, shared_grids
from buildlib.quantize.recipe import matrix_uses
from buildlib.quantize.variants import Quantized, VariantModel, constant_names
from buildlib.sizes import size_text

UnitKind = Literal["weight", "key", "value", "residual", "activation", "constant"]
UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)
_RESIDUAL = re.compile(r"embedding(_scaled)?|layer_\d+_(attention_residual|output)")
KIND_PLURALS: Mapping[UnitKind, str] = {
    "weight": "weights", "key": "keys", "value": "values", "residual": "hidden states",
    "activation": "activations",
}  # fmt: skip
LARGE_LOSS = 0.1
"""KL divergence in nats that is worth a warning: text of the model in float then has a perplexity
that is 10 % higher (`exp(0.1)`)."""
SMALL_LOSS = 0.02
"""KL divergence in nats up to which nothing is looked for: 8 bits with room cost no more."""
_FEW_STEPS = 16
"""Half of all values on fewer steps than these have less than 4 bits."""
_TOLD_PART = 0.1
"""Part of the whole loss that a kind of tensors has at least, to be told."""
_FOUR, _EIGHT = 4, 8
_MOST_NATS = 700.0


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


@dataclass(frozen=True)
class CoarseGrid:
    """A grid that is too coarse for most of what lies on it.

    Attributes:
        layer: that made its values.
        largest, median: of the absolute values.
        steps: of the grid between the median and its negative.
    """

    layer: int
    largest: float
    median: float
    bits: int
    steps: float


def _has_sizes(name: str) -> bool:
    """Return whether the sizes of a value are looked at."""
    return activation_kind([name]) != "activation"


@dataclass(frozen=True)
class KindLoss:
    """KL divergence in nats of all tensors of a kind quantized alone, and their encodings."""

    kind: UnitKind
    kl: float
    encodings: Quantized


@dataclass
class ValueSizes:
    """Largest and median absolute value of keys, values and residual stream, call by call."""

    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def observe(self, outputs: Arrays, n_tokens: int) -> None:
        """Take in the outputs of one call of a segment."""
        del n_tokens
        for name, array in outputs.items():
            if _has_sizes(name):
                sizes = np.abs(array)
                one = (float(sizes.max()), float(np.median(sizes)))
                self.calls.setdefault(name, []).append(one)

    def coarse_grids(self, encodings: Quantized) -> list[CoarseGrid]:
        """Return the grids that leave most values few steps, the coarsest first."""
        grids = []
        for name, sizes in self.calls.items():
            encoding, layer = encodings.get(name), "".join(filter(str.isdigit, name))
            if encoding is None or not layer:
                continue
            largest, median = max(one for one, _ in sizes), float(np.mean([m for _, m in sizes]))
            steps = 2 * median / encoding.scale[0]
            if steps < _FEW_STEPS:
                grids.append(CoarseGrid(int(layer), largest, median, encoding.bw, steps))
        return sorted(grids, key=lambda grid: grid.steps)


class LossMeter(Closeable):
    """Measures the loss of encodings of one model.

    Args:
        float_model: that the model was made of, in canonical form, at a prefill shape.
        model: the same, or what techniques have made of it, with float weights.
        config: of both.
        windows: of tokens, without bos; each is cut to whole calls.

    Attributes:
        sizes: of values of `model` in float, once `kinds` has run.
    """

    def __init__(
        self,
        float_model: Path,
        model: Path,
        config: DecoderConfig,
        windows: Sequence[Sequence[int]],
    ) -> None:
        self._model = VariantModel(model, config, windows, join=True)
        self.sizes = ValueSizes()
        try:
            self._model.record(float_model)
        except BaseException:
            self._model.close()
            raise

    def close(self) -> None:
        """Remove its files."""
        self._model.close()

    def whole(self, encodings: Quantized) -> Divergence:
        """Measure the whole quantization."""
        return self._model.measure([encodings], encodings)[0].divergence

    def kinds(self, encodings: Quantized) -> list[KindLoss]:
        """Measure each kind of tensors alone, and return the most expensive first."""
        graphs = [self._model.graph(index) for index in range(len(self._model.names))]
        parts: dict[UnitKind, dict[str, Encoding]] = {}
        for unit in find_units(graphs, encodings):
            kind: UnitKind = "activation" if unit.kind == "constant" else unit.kind
            parts.setdefault(kind, {}).update(unit.encodings)
        self.sizes = ValueSizes()
        variants = self._model.measure(
            [*parts.values(), {}], on_outputs=self.sizes.observe, observed=_has_sizes
        )
        *found, base = (one.divergence.kl for one in variants)
        # All variants have the weights that techniques have changed; float weights cost nothing.
        costs = [
            KindLoss(kind, one if kind == "weight" else max(one - base, 0.0), own)
            for (kind, own), one in zip(parts.items(), found, strict=True)
        ]
        return sorted(costs, key=lambda cost: -cost.kl)


def judge_quantization(
    meter: LossMeter, encodings: Encodings, given: Encodings, open_cache: int | None = None
) -> tuple[Encodings, LossRecord]:
    """Measure the loss of a quantization, and say what its bits do not hold.

    Args:
        given: the user's own encodings, which options do not change.
        open_cache: bytes of the cache, if keys and values of 8 bits may get 16: they do where they
            cost more than `SMALL_LOSS`, and less so.

    Returns:
        The encodings, with those of keys and values replaced if they got more bits.

    Raises:
        BuildError: the logits of one of both models are not finite.
    """
    by_name, remark = encodings.by_name(), ""
    try:
        whole = meter.whole(by_name)
        kinds = meter.kinds(by_name) if whole.kl > SMALL_LOSS else []
        cache = [one for one in kinds if one.kind in {"key", "value"}]
        cost = sum(one.kl for one in cache)
        if open_cache is not None and cost > SMALL_LOSS:
            wide = {name: _widened(one) for part in cache for name, one in part.encodings.items()}
            better = meter.whole(by_name | wide)
            if better.kl < whole.kl:
                remark = (
                    f"keys and values have 16 bits: in 8 they cost a KL divergence of {cost:.2g}; "
                    f"the cache takes {size_text(open_cache)} more, which each decode step reads: "
                    "quantization.kv_bitwidth=8 keeps 8"
                )
                kinds, whole = [one for one in kinds if one not in cache], better
                by_name, encodings = by_name | wide, _replaced(encodings, wide)
    except ValueError as error:
        raise BuildError(f"the quantized model cannot be compared with float: {error}") from error
    least = _TOLD_PART * whole.kl if whole.kl > SMALL_LOSS else math.inf
    told = [one for one in kinds if one.kl >= least]
    return encodings, LossRecord(
        kl_divergence=float(f"{whole.kl:.3g}"),
        top1_agreement=round(whole.top1, 4),
        perplexity=_perplexity(whole.loss),
        perplexity_float=_perplexity(whole.loss_float),
        tokens=whole.steps,
        kinds={one.kind: float(f"{one.kl:.3g}") for one in kinds},
        remarks=tuple(_remark(one, meter.sizes, given.by_name()) for one in told),
        cache_remark=remark,
    )


def _widened(encoding: Encoding) -> Encoding:
    """Return the range of a symmetric grid on 16 bits."""
    largest = encoding.scale[0] * ((1 << (encoding.bw - 1)) - 1)
    return symmetric_encoding(encoding.name, largest, 16)


def _replaced(encodings: Encodings, others: Quantized) -> Encodings:
    own = encodings.activation_encodings
    activations = tuple(others.get(encoding.name, encoding) for encoding in own)
    return encodings.model_copy(update={"activation_encodings": activations})


def _perplexity(loss: float) -> float:
    return float(f"{math.exp(min(loss, _MOST_NATS)):.5g}")


def _remark(loss: KindLoss, sizes: ValueSizes, given: Quantized) -> str:
    text = f"{KIND_PLURALS[loss.kind]} cost a KL divergence of {loss.kl:.2g}"
    grids = sizes.coarse_grids(loss.encodings)
    if grids:
        text = f"{_describe(loss.kind, grids)}; all {text}"
    remedy = _remedy(loss, given)
    return f"{text}: {remedy}" if remedy else text


def _describe(kind: UnitKind, grids: Sequence[CoarseGrid]) -> str:
    """Say how coarse the first of some grids of a kind is, and how many more are."""
    worst, more = grids[0], len(grids) - 1
    others = f", and fewer than {_FEW_STEPS} in {more} others" if more else ""
    return (
        f"layer {worst.layer}: {KIND_PLURALS[kind]} reach {worst.largest:,.0f}, median "
        f"{worst.median:.2g}; {worst.bits} bits leave most of them {worst.steps:.2g} steps{others}"
    )


def _remedy(loss: KindLoss, given: Quantized) -> str | None:
    """Return what gives tensors of a kind more bits; None where nothing does."""
    few = _FOUR if loss.kind == "weight" else _EIGHT
    coarse = [one for one in loss.encodings.values() if one.stored_bits <= few]
    if not coarse:
        return None
    if any(one.name in given for one in coarse):
        return "give its encodings more bits"
    if loss.kind == "weight":
        mixed = not any(".down_proj." in one.name for one in coarse)
        return f"quantization.{'param_bitwidth=8' if mixed else 'recipe=w4a16-mixed'}"
    cache = loss.kind in {"key", "value"}
    return f"quantization.{'kv_bitwidth' if cache else 'act_bitwidth'}=16"


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


def _weights(graph: ir.Graph, segment: int, encodings: Quantized) -> Iterator[Unit]:
    for name in {use.name: use for use in matrix_uses(graph)}:
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
    weights = {use.name for use in matrix_uses(graph)}
    grouped_names: set[str] = set(weights)
    for names in shared_grids(graph):
        own = {
            name: encodings[name]
            for name in sorted(names - {border} - weights)
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
