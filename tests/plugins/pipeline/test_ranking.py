"""What the quantization of each tensor costs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.model import Encodings
from buildlib.errors import BuildError
from buildlib.graph.files import load_model, tensor_array
from buildlib.numerics.divergence import sqnr_db
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.loss import UNIT_KINDS, UnitKind
from buildlib.quantize.optimization import optimize_weights
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.techniques.base import FloatModel
from plugins.pipeline.ranking import (
    Granularity,
    RankedModel,
    Sensitivity,
    changed_weights,
    rank_tensors,
)
from tests.buildlib.quantize.conftest import config, path
from tests.buildlib.quantize.test_variants import BAD, WINDOWS, four_bits, kl, round_weight

__all__ = ["config", "four_bits", "kl", "path"]  # fixtures


@pytest.fixture(scope="module")
def model(path: Path, config: DecoderConfig) -> Iterator[RankedModel]:
    with RankedModel(path, config, WINDOWS) as opened:
        yield opened


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
    with RankedModel(path, config, WINDOWS, changed) as model:
        model.record_noise(encodings.by_name())
        [found] = model.measure([encodings.by_name()])
    assert found.divergence.kl == pytest.approx(wanted, rel=0.02)
    (tmp_path / "rotated").mkdir()
    rotated = optimize_weights(given, ["spinquant"], tmp_path / "rotated")
    with pytest.raises(BuildError, match="something else has changed"):
        changed_weights(path, rotated.path)


@pytest.mark.parametrize(
    "granularity", [pytest.param("tensor", marks=pytest.mark.variant), "layer"]
)
def test_a_bad_tensor_ranks_first(
    model: RankedModel, four_bits: Encodings, granularity: Granularity
) -> None:
    encodings = four_bits.by_name()
    good = encodings[BAD]
    encodings[BAD] = good.model_copy(update={"scale": tuple(16 * s for s in good.scale)})
    kinds: tuple[UnitKind, ...] = ("weight",) if granularity == "tensor" else UNIT_KINDS
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
        words = {"weights", "keys", "values", "hidden states", "activations"}
        names = {f"layer {layer} {kind}" for layer in (0, 1) for kind in words}
        assert names <= {cost.unit.name for cost in found.costs}
        assert {name for cost in found.costs for name in cost.unit.encodings} == set(encodings)
    if granularity == "tensor":
        assert worst.sqnr_db is not None
        assert worst.sqnr_db < 5
        assert worst.output_sqnr_db == min(
            c.output_sqnr_db
            for c in found.costs
            if c.output_sqnr_db is not None and c.unit.segment == worst.unit.segment
        )


@pytest.fixture(scope="module")
def ranked(model: RankedModel, four_bits: Encodings) -> Sensitivity:
    kinds: tuple[UnitKind, ...] = ("weight",)
    return rank_tensors(model, four_bits.by_name(), granularity="tensor", kinds=kinds)


def test_the_sqnr_is_that_of_the_rounded_values(
    path: Path, model: RankedModel, four_bits: Encodings, ranked: Sensitivity
) -> None:
    encodings = four_bits.by_name()
    (found,) = [cost for cost in ranked.costs if cost.unit.name == BAD]
    loaded = load_model(path)
    stored = loaded.graph.initializers[BAD].const_value
    assert stored is not None
    wanted = sqnr_db(tensor_array(stored), round_weight(loaded, encodings[BAD]))
    assert found.sqnr_db == pytest.approx(wanted, abs=0.01)
    kinds: tuple[UnitKind, ...] = ("key",)
    found_keys = rank_tensors(model, encodings, granularity="tensor", kinds=kinds).costs
    assert {cost.unit.name for cost in found_keys} == {"layer_0_keys", "layer_1_keys"}
    for cost in found_keys:
        assert cost.remedy == "kv_bitwidth=16"
        assert cost.sqnr_db is not None
        assert 25 < cost.sqnr_db < 60
