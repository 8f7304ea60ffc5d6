"""Exact rescaling of keys and values."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import load_tokenizer, text_windows
from buildlib.encodings.model import Encodings
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import open_onnx
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import observe_ranges
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.scaling import Scaling
from buildlib.quantize.variants import VariantModel
from suites.models import tiny_llama
from tests.buildlib import families

SHAPE = GraphShape(8, 32)
EVERYDAY = {"gemma3", "glm", "olmo2", "phi3"}
"""Of each kind of norm and rotation one."""


def float_model(folder: Path, out: Path) -> FloatModel:
    checkpoint = Checkpoint.load(folder)
    rng = np.random.default_rng(5)
    windows = rng.integers(3, checkpoint.config.vocab_size, (2, 24)).tolist()
    model = export_onnx(checkpoint, SHAPE, out)
    return FloatModel(model, Encodings(), checkpoint.config, windows, Bitwidths(), 2)


def scaled(model: FloatModel, folder: Path) -> FloatModel:
    folder.mkdir()
    return Scaling("scaling").optimize(model, folder)


def logits(model: FloatModel) -> npt.NDArray[np.float32]:
    with open_onnx(model.path, model.config) as loop:
        return np.concatenate([loop.feed(model.token_windows[0][:12]), loop.feed([5, 6, 7])])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.variant)
        for name in (*families.RECIPES, "baichuan")
    ],
)
def test_every_family_computes_the_same_with_equal_keys(name: str, tmp_path: Path) -> None:
    folder = families.write_checkpoint(tmp_path / "model", families.family_config(name))
    model = float_model(folder, tmp_path / "float")
    done = scaled(model, tmp_path / "scaled")
    assert np.allclose(logits(done), logits(model), rtol=1e-4, atol=1e-4)
    assert done.ranges is not None
    observed = observe_ranges(done.path, done.config, done.token_windows).ranges()
    assert observed.keys() == done.ranges.keys()
    for key, pair in observed.items():
        assert done.ranges[key] == pytest.approx(pair, rel=1e-4, abs=1e-4), key
    for layer in range(done.config.num_hidden_layers):
        assert done.factors.keys() >= {
            interface.past_key(layer, "out"),
            interface.past_value(layer, "out"),
        }


def test_a_gain_that_others_read_stays(tmp_path: Path) -> None:
    """A layer whose constants are not its own alone is left as it is."""
    folder = families.write_checkpoint(tmp_path / "model", families.family_config("gemma3"))
    model = float_model(folder, tmp_path / "float")
    graph = load_model(model.path)
    gains = {
        str(node.outputs[0].name): node
        for node in graph.graph
        if node.op_type == "RMSNormalization"
    }
    one, other = gains["layer_0_k_norm"], gains["layer_1_k_norm"]
    other.replace_input_with(1, one.inputs[1])
    save_model(graph, model.path)
    done = scaled(model, tmp_path / "scaled")
    keys = {name for name in done.factors if name.startswith("past_key")}
    assert keys == {"past_key_2_out"}
    assert np.allclose(logits(done), logits(model), rtol=1e-4, atol=1e-4)


def test_outliers_cost_nothing_once_they_are_rescaled(outlier_model: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(outlier_model)
    tokenizer, bos = checkpoint.tokenizer_path, checkpoint.config.bos_token_id
    calibrating = text_windows(tokenizer, tiny_llama.calibration_text(), 192, bos, 4)
    path = export_onnx(checkpoint, GraphShape(64, 192), tmp_path / "float")
    model = FloatModel(path, Encodings(), checkpoint.config, calibrating, Bitwidths(), 4)
    losses = []
    held_out = load_tokenizer(tokenizer).encode(tiny_llama.heldout_text()).ids[1:193]
    for each in (model, scaled(model, tmp_path / "scaled")):
        encodings = complete_encodings(
            each.path, Encodings(), each.config, calibrating, observed=each.ranges
        ).by_name()
        caches = {name: one for name, one in encodings.items() if interface.is_kv(name)}
        with VariantModel(each.path, each.config, [held_out]) as variants:
            variants.record(each.path)
            losses += [one.divergence.kl for one in variants.measure([caches, encodings])]
    keys_before, before, keys_after, after = losses
    assert keys_before > 0.15
    assert keys_after < 0.001
    assert after < min(0.002, before / 20)
