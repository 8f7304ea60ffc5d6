"""What the quantization of each tensor costs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import weight_grid
from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import BuildError
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.numerics.divergence import sqnr_db
from buildlib.numerics.evaluation import evaluate_model, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.optimization import optimize_weights
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.sensitivity.ranking import (
    UNIT_KINDS,
    Granularity,
    Sensitivity,
    UnitKind,
    find_units,
    rank_tensors,
)
from buildlib.quantize.sensitivity.sweep import SensitivityModel, changed_weights
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
    with pytest.raises(BuildError, match="something else has changed"):
        changed_weights(path, rotated.path)


@pytest.mark.parametrize(
    "granularity", [pytest.param("tensor", marks=pytest.mark.variant), "layer"]
)
def test_a_bad_tensor_ranks_first(
    model: SensitivityModel, four_bits: Encodings, granularity: Granularity
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
def ranked(model: SensitivityModel, four_bits: Encodings) -> Sensitivity:
    kinds: tuple[UnitKind, ...] = ("weight",)
    return rank_tensors(model, four_bits.by_name(), granularity="tensor", kinds=kinds)


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
    units = find_units(list(graphs), encodings)
    keys = [unit for unit in units if unit.kind == "key"]
    assert [unit.name for unit in keys] == ["layer_0_keys", "layer_1_keys"]
    for unit in keys:
        assert unit.remedy == "kv_bitwidth=16"
        assert 25 < min(noise[name] for name in unit.encodings if name in noise) < 60
