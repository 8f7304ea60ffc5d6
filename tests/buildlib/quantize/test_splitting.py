"""Massive channels of the residual stream, split."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.encodings.model import Encodings
from buildlib.graph.files import load_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import static_shape
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.sensitivity.ranking import find_units
from buildlib.quantize.sensitivity.sweep import SensitivityModel
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.splitting import Splitting, find_massive, split_of
from tests.builders import builder_for
from tests.buildlib import families
from tests.buildlib.quantize.test_scaling import float_model, logits

CHANNEL, GAIN = 5, 3000.0


def massive_model(name: str, folder: Path) -> FloatModel:
    """Return a family's model in float, whose layers add massive numbers that count for little."""
    checkpoint = families.write_checkpoint(folder / "model", families.family_config(name))
    weights = load_file(checkpoint / "model.safetensors")
    for key, values in weights.items():
        if key.endswith("post_feedforward_layernorm.weight"):
            values[CHANNEL] = GAIN
        elif key.endswith(
            (".input_layernorm.weight", "pre_feedforward_layernorm.weight", "model.norm.weight")
        ):
            values[CHANNEL] = -1.0  # gains are 1 + w
    save_file(weights, checkpoint / "model.safetensors")
    return float_model(checkpoint, folder / "float")


def split(model: FloatModel, folder: Path) -> FloatModel:
    folder.mkdir()
    return Splitting("splitting").optimize(model, folder)


def stream_cost(model: FloatModel) -> float:
    """Return by how much hidden states of 16 bits, one by one, change the loss of the model."""
    encodings = complete_encodings(model.path, Encodings(), model.config, model.token_windows)
    with SensitivityModel(model.path, model.config, model.token_windows) as sensitivity:
        graphs = [sensitivity.graph(index) for index in range(len(sensitivity.names))]
        units = find_units(graphs, encodings.by_name())
        parts = [unit.encodings for unit in units if unit.kind == "residual"]
        *costs, base = (one.divergence.kl for one in sensitivity.measure([*parts, {}]))
    return sum(abs(cost - base) for cost in costs)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_split_model_computes_the_same_and_quantizes_better(name: str, tmp_path: Path) -> None:
    model = massive_model(name, tmp_path)
    done = split(model, tmp_path / "split")
    exact = logits(model)
    assert split_of(done.path) == {CHANNEL: 33}
    assert np.square(logits(done) - exact).mean() <= 1e-6 * np.square(exact).mean()
    wide = convert_arcl(done.path, GraphShape(1, 32), tmp_path / "decode" / "model.onnx")
    dims = {str(v.name): static_shape(v) for node in load_model(wide).graph for v in node.outputs}
    width = model.config.hidden_size + 32
    assert dims["layer_0_output"] == (1, 1, width)
    assert stream_cost(done) < stream_cost(model) / 3


@pytest.mark.needs("libatomic1")
def test_a_container_names_its_split_channels(tmp_path: Path) -> None:
    massive_model("gemma3", tmp_path)
    folder = tmp_path / "model"
    (folder / "text").mkdir()
    (folder / "text" / "calibration.txt").write_text("".join(map(chr, range(0x103, 0x13F))) * 9)
    container = builder_for(folder, tmp_path / "cache", [8, 1], [32], None).build()
    assert container.metadata.model.quantization["split"] == f"{CHANNEL} into 33"


def test_a_split_model_is_not_split_again(tmp_path: Path) -> None:
    done = split(massive_model("gemma3", tmp_path), tmp_path / "split")
    assert not find_massive(done.path)


@pytest.mark.parametrize("name", ["gemma3", "llama-biases", "olmo2"])
def test_a_model_without_massive_channels_stays(name: str, tmp_path: Path) -> None:
    folder = families.write_checkpoint(tmp_path / "model", families.family_config(name))
    model = float_model(folder, tmp_path / "float")
    assert split(model, tmp_path / "split") is model
