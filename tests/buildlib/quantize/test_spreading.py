"""Massive channels of the residual stream, rotated or split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.encodings.model import Encodings
from buildlib.graph.files import load_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import static_shape
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.calibration import observe_ranges
from buildlib.quantize.loss import find_units
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.scaling import constant_array
from buildlib.quantize.techniques.splitting import split_of
from buildlib.quantize.techniques.spreading import (
    Spreading,
    describe_spreading,
    write_spread_alike,
)
from buildlib.quantize.variants import VariantModel
from tests.builders import builder_for
from tests.buildlib import families
from tests.buildlib.quantize.test_outliers import text_tokens
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


def spread(model: FloatModel, folder: Path) -> FloatModel:
    folder.mkdir()
    return Spreading("spreading").optimize(model, folder)


def stream_cost(model: FloatModel) -> float:
    """Return by how much hidden states of 16 bits, one by one, change the loss of the model."""
    encodings = complete_encodings(model.path, Encodings(), model.config, model.token_windows)
    with VariantModel(model.path, model.config, model.token_windows) as sensitivity:
        graphs = [sensitivity.graph(index) for index in range(len(sensitivity.names))]
        units = find_units(graphs, encodings.by_name())
        parts = [unit.encodings for unit in units if unit.kind == "residual"]
        *costs, base = (one.divergence.kl for one in sensitivity.measure([*parts, {}]))
    return sum(abs(cost - base) for cost in costs)


@pytest.mark.parametrize("name", [pytest.param("gemma2", marks=pytest.mark.variant), "gemma3"])
def test_a_split_model_computes_the_same_and_quantizes_better(name: str, tmp_path: Path) -> None:
    model = massive_model(name, tmp_path)
    done = spread(model, tmp_path / "split")
    exact = logits(model)
    assert split_of(done.path) == {CHANNEL: 33}
    assert np.square(logits(done) - exact).mean() <= 1e-6 * np.square(exact).mean()
    wide = convert_arcl(done.path, GraphShape(1, 32), tmp_path / "decode" / "model.onnx")
    dims = {str(v.name): static_shape(v) for node in load_model(wide).graph for v in node.outputs}
    width = model.config.hidden_size + 32
    assert dims["layer_0_output"] == (1, 1, width)
    assert stream_cost(done) < stream_cost(model) / 3


@pytest.mark.parametrize(
    "name",
    ["glm", *(pytest.param(name, marks=pytest.mark.variant) for name in ("granite", "qwen3-yarn"))],
)
def test_a_model_with_massive_activations_is_rotated(name: str, tmp_path: Path) -> None:
    checkpoint = families.write_checkpoint(tmp_path / "model", families.family_config(name))
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][7, CHANNEL] = GAIN
    save_file(weights, checkpoint / "model.safetensors")
    plain = float_model(checkpoint, tmp_path / "float")
    model = replace(plain, token_windows=[[7, *window] for window in plain.token_windows])
    done = spread(model, tmp_path / "rotated")
    exact = logits(model)
    assert describe_spreading(done.path) == "rotated"
    assert np.square(logits(done) - exact).mean() <= 1e-6 * np.square(exact).mean()
    before, after = (
        observe_ranges(one.path, one.config, one.token_windows, narrow=False).ranges()
        for one in (model, done)
    )
    assert max(np.abs(after["layer_0_output"])) < max(np.abs(before["layer_0_output"])) / 3
    (tmp_path / "again").mkdir()
    again = write_spread_alike(model.path, done.path, tmp_path / "again")
    ours, theirs = (load_model(path).graph.initializers for path in (again, done.path))
    assert all(np.array_equal(constant_array(ours[k]), constant_array(theirs[k])) for k in theirs)


def test_a_model_whose_weights_would_lose_more_stays(outlier_model: Path, tmp_path: Path) -> None:
    """A single weight writes its massive number, and steps of 8 bits would reach it everywhere."""
    model = replace(float_model(outlier_model, tmp_path / "float"), token_windows=[text_tokens(24)])
    assert spread(model, tmp_path / "spread") is model


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"recipe": "w8a16"}, "spreading"),
        ({"recipe": "w4a16"}, "spreading"),
        ({"recipe": "w4a16-rtn"}, "splitting"),
        ({"recipe": "LPBQ_SeqMSE"}, "splitting"),
        ({"recipe": "w4a16-spinquant"}, "spinquant"),
        ({"recipe": "w8a16", "spreading": False}, "scaling"),
    ],
)
def test_a_rotation_is_for_weights_that_can_take_it(options: dict[str, Any], first: str) -> None:
    assert QuantizationOptions(**options).steps(encoded=False)[0] == first


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_a_container_names_its_split_channels(tmp_path: Path) -> None:
    massive_model("gemma3", tmp_path)
    folder = tmp_path / "model"
    (folder / "text").mkdir()
    (folder / "text" / "calibration.txt").write_text("".join(map(chr, range(0x103, 0x13F))) * 9)
    container = builder_for(folder, tmp_path / "cache", [8, 1], [32], None).build()
    assert (
        container.metadata.model.quantization["hidden_states"]
        == f"channels split: {CHANNEL} into 33"
    )


def test_a_split_model_is_not_split_again(tmp_path: Path) -> None:
    done = spread(massive_model("gemma3", tmp_path), tmp_path / "split")
    assert spread(done, tmp_path / "again") is done


def test_a_model_without_massive_channels_stays(tmp_path: Path) -> None:
    folder = families.write_checkpoint(tmp_path / "model", families.family_config("olmo2"))
    model = float_model(folder, tmp_path / "float")
    assert spread(model, tmp_path / "split") is model
