"""Variants of a model in one sweep, against models that are made another way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import weight_grid
from buildlib.encodings.model import Encoding, Encodings
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.numerics.evaluation import evaluate_model, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.variants import VariantModel

WINDOWS = [np.random.default_rng(0).integers(2, 300, 32).tolist()]
BAD = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def four_bits(path: Path, config: DecoderConfig) -> Encodings:
    return complete_encodings(path, Encodings(), config, WINDOWS, Bitwidths(param_bitwidth=4))


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
    path: Path,
    config: DecoderConfig,
    kl: Callable[[Path], float],
    four_bits: Encodings,
    tmp_path: Path,
) -> None:
    encodings = four_bits.by_name()
    with VariantModel(path, config, WINDOWS) as model:
        model.record(path)
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
