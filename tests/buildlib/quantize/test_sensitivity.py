"""Costs of tensors, and the mixed precision proposed from them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import weight_grid
from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import BuildError, InvalidOptionError
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.numerics.divergence import Divergence, sqnr_db
from buildlib.numerics.evaluation import evaluate_model, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.mixed_precision.proposal import (
    PrecisionSearch,
    QualityBound,
    measure_sweep,
    mixed_encodings,
)
from buildlib.quantize.mixed_precision.sensitivity import (
    UNIT_KINDS,
    Granularity,
    Sensitivity,
    Unit,
    UnitKind,
    find_units,
    rank_tensors,
)
from buildlib.quantize.mixed_precision.sweep import SensitivityModel, changed_weights
from buildlib.quantize.optimization import optimize_weights
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.techniques.base import FloatModel

WINDOWS = [np.random.default_rng(0).integers(2, 300, 32).tolist()]
BAD = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def four_bits(path: Path, config: DecoderConfig) -> Encodings:
    return complete_encodings(path, Encodings(), config, WINDOWS, Bitwidths(param_bitwidth=4))


@pytest.fixture(scope="module")
def model(path: Path, config: DecoderConfig) -> Iterator[SensitivityModel]:
    with SensitivityModel(path, config, WINDOWS) as opened:
        yield opened


@pytest.fixture(scope="module")
def kl(path: Path, config: DecoderConfig) -> Iterator[Callable[[Path], float]]:
    """The divergence of a model on the CPU from float."""
    with record_float(path, config, WINDOWS) as reference:

        def measure(path: Path) -> float:
            with HostLoop({16: [OnnxRunner(path)]}, config) as loop:
                return evaluate_model(loop, reference).kl

        yield measure


def round_weight(model: ir.Model, encoding: Encoding) -> npt.NDArray[np.float32]:
    stored, grid = model.graph.initializers[encoding.name].const_value, weight_grid(encoding)
    assert stored is not None
    return grid.dequantize(grid.quantize(tensor_array(stored), 0), 0)


def replaced(encodings: Encodings, by: Mapping[str, Encoding]) -> Encodings:
    groups = ("activation_encodings", "param_encodings")
    return encodings.model_copy(
        update={g: tuple(by.get(e.name, e) for e in getattr(encodings, g)) for g in groups}
    )


def test_variants_are_those_of_models_made_another_way(
    model: SensitivityModel,
    path: Path,
    kl: Callable[[Path], float],
    four_bits: Encodings,
    tmp_path: Path,
) -> None:
    encodings = four_bits.by_name()
    model.record(encodings)
    nothing, all_of_them, one = model.measure([{}, encodings, {BAD: encodings[BAD]}])
    assert nothing.divergence.kl == 0.0
    wanted = kl(apply_encodings(path, four_bits, tmp_path / "q.onnx"))
    assert all_of_them.divergence.kl == pytest.approx(wanted, rel=0.02)
    changed = load_model(path)
    value = changed.graph.initializers[BAD]
    rounded = round_weight(changed, encodings[BAD])
    value.const_value = ir.tensor(rounded.astype(np.float32), name=BAD)
    value.dtype = ir.DataType.FLOAT
    for use in list(value.uses()):  # a cast from float16
        use.node.replace_input_with(use.idx, value)
    alone = kl(save_model(changed, tmp_path / "one.onnx"))
    assert one.divergence.kl == pytest.approx(alone, rel=0.02)
    assert 0 < one.divergence.kl < wanted


def test_weights_that_a_technique_changed_count_as_changed(
    path: Path, config: DecoderConfig, kl: Callable[[Path], float], tmp_path: Path
) -> None:
    bits = Bitwidths(param_bitwidth=4)
    given = FloatModel(path, Encodings(), config, WINDOWS, bits)
    made = optimize_weights(given, ["gptq"], tmp_path)
    encodings = complete_encodings(made.path, made.encodings, config, WINDOWS, bits)
    wanted = kl(apply_encodings(made.path, encodings, tmp_path / "q.onnx"))
    changed = changed_weights(path, made.path)
    assert len(changed) == 14
    with SensitivityModel(path, config, WINDOWS, changed) as model:
        model.record(encodings.by_name())
        [found] = model.measure([encodings.by_name()])
    assert found.divergence.kl == pytest.approx(wanted, rel=0.02)
    (tmp_path / "rotated").mkdir()
    rotated = optimize_weights(given, ["spinquant"], tmp_path / "rotated")
    with pytest.raises(BuildError, match="leave spinquant out"):
        changed_weights(path, rotated.path)


@pytest.mark.parametrize("granularity", ["tensor", "layer"])
def test_a_bad_tensor_ranks_first(
    model: SensitivityModel, four_bits: Encodings, granularity: Granularity
) -> None:
    encodings = four_bits.by_name()
    good = encodings[BAD]
    encodings[BAD] = good.model_copy(update={"scale": tuple(16 * s for s in good.scale)})
    kinds = ("weight",) if granularity == "tensor" else UNIT_KINDS
    found = rank_tensors(model, encodings, granularity=granularity, kinds=kinds, both_ways=True)
    worst, second = found.costs[:2]
    assert worst.unit.name == (BAD if granularity == "tensor" else "layer 1 weights")
    assert worst.alone.kl > 1.5 * second.alone.kl
    assert worst.rest is not None
    assert worst.rest.kl == min(c.rest.kl for c in found.costs if c.rest)
    assert worst.rest.kl < found.whole.kl
    kls = [cost.alone.kl for cost in found.costs]
    assert kls == sorted(kls, reverse=True)
    if granularity == "layer":
        assert {name for cost in found.costs for name in cost.unit.low} == set(encodings)
    if granularity == "tensor":
        assert worst.sqnr_db is not None
        assert worst.sqnr_db < 5
        assert worst.output_sqnr_db == min(
            c.output_sqnr_db
            for c in found.costs
            if c.output_sqnr_db is not None and c.unit.segment == worst.unit.segment
        )


@pytest.fixture(scope="module")
def ranked(model: SensitivityModel, four_bits: Encodings) -> Sensitivity:
    kinds: tuple[UnitKind, ...] = ("weight",)
    return rank_tensors(model, four_bits.by_name(), granularity="tensor", kinds=kinds)


def n_raisable(ranked: Sensitivity) -> int:
    return sum(cost.unit.kind == "weight" and bool(cost.unit.high) for cost in ranked.costs)


def test_the_sqnr_is_that_of_the_rounded_values(
    path: Path, model: SensitivityModel, four_bits: Encodings, ranked: Sensitivity
) -> None:
    encodings = four_bits.by_name()
    (found,) = [cost for cost in ranked.costs if cost.unit.name == BAD]
    loaded = load_model(path)
    stored = loaded.graph.initializers[BAD].const_value
    assert stored is not None
    wanted = sqnr_db(tensor_array(stored), round_weight(loaded, encodings[BAD]))
    assert found.sqnr_db == pytest.approx(wanted, abs=0.01)
    noise, graphs = model.record(encodings), map(model.graph, range(len(model.names)))
    units = find_units(list(graphs), encodings, model.ar)
    caches = [unit for unit in units if any(n.startswith("past_key") for n in unit.low)]
    assert caches
    for unit in caches:
        assert not unit.high
        assert 25 < min(noise[name] for name in unit.low if name in noise) < 60


def test_a_proposal_meets_its_bound_and_is_small(
    model: SensitivityModel,
    ranked: Sensitivity,
    kl: Callable[[Path], float],
    path: Path,
    four_bits: Encodings,
    tmp_path: Path,
) -> None:
    before = kl(apply_encodings(path, four_bits, tmp_path / "q.onnx"))
    bound = QualityBound("kl", before / 3)
    found = PrecisionSearch(ranked.costs, bound, measure_sweep(model, ranked.encodings)).propose()
    assert found.met
    assert 0 < len(found.raised) < n_raisable(ranked)
    assert set(found.bits.values()) == {8}
    assert found.bytes_more == sum(unit.bytes_more for unit in found.raised)
    mixed = replaced(four_bits, mixed_encodings(ranked.encodings, found.raised))
    after = kl(apply_encodings(path, mixed, tmp_path / "q.onnx"))
    assert after < before / 3 * 1.03
    assert after == pytest.approx(found.after.kl, rel=0.03)


def test_bounds_that_hold_already_or_never(model: SensitivityModel, ranked: Sensitivity) -> None:
    measure = measure_sweep(model, ranked.encodings)
    nothing = PrecisionSearch(ranked.costs, QualityBound.parse("kl=1000"), measure).propose()
    assert nothing.met
    assert not nothing.raised
    assert nothing.measurements == 1
    bound = QualityBound.parse("kl=0.0000001")
    everything = PrecisionSearch(ranked.costs, bound, measure).propose()
    assert not everything.met
    assert len(everything.raised) == n_raisable(ranked)
    assert everything.after.kl < everything.before.kl


def test_a_mixture_that_turns_out_worse_gets_the_next_weights(ranked: Sensitivity) -> None:
    """Each weight at 8 bits takes a hundredth off a divergence of 0.3."""
    seen: list[int] = []

    def measure(raised: Sequence[Unit]) -> Divergence:
        seen.append(len(raised))
        return Divergence(0.3 - 0.01 * len(raised), 0.9, 2.0, 2.0, 8)

    search = PrecisionSearch(ranked.costs, QualityBound("kl", 0.255), measure)
    first = search.propose(attempts=0)
    assert (len(first.raised), first.met) == (5, True)
    second = search.extend(first, margin=0.02)
    assert second is not None
    assert [unit.name for unit in second.raised[:5]] == [unit.name for unit in first.raised]
    assert len(second.raised) == 7
    assert second.after.kl == pytest.approx(0.23)
    far = search.extend(second, margin=10.0)  # no mixture is so much better: twice as many
    assert far is not None
    n_all = n_raisable(ranked)
    assert len(far.raised) == min(14, n_all)
    while far is not None:
        last, far = far, search.extend(far, margin=10.0)
    assert len(last.raised) == n_all
    assert len(seen) == len(set(seen))


def test_bounds_are_read_and_a_perplexity_is_relative_on_other_text() -> None:
    assert QualityBound.parse("2%") == QualityBound("relative", 0.02)
    assert QualityBound.parse(" kl = 0.01") == QualityBound("kl", 0.01)
    assert QualityBound.parse("20.5") == QualityBound("perplexity", 20.5)
    found = Divergence(kl=0.3, top1=0.9, loss=math.log(11), loss_float=math.log(10), steps=1)
    bound = QualityBound.parse("12").beside(found)
    assert bound.measure == "relative"
    assert bound.limit == pytest.approx(0.2)
    for text in ("2%", "kl=0.1"):
        assert QualityBound.parse(text).beside(found) == QualityBound.parse(text)
    assert QualityBound("relative", 0.1001).holds(found)
    assert not QualityBound("relative", 0.0999).holds(found)
    for text in ("", "x", "kl=2%", "-1", "kl"):
        with pytest.raises(InvalidOptionError, match="bound"):
            QualityBound.parse(text)
