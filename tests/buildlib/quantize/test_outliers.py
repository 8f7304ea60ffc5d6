"""The reference model with the outliers of real ones: what it computes, and what its bits hold."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encodings
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.divergence import Logits
from buildlib.numerics.host_loop import HostLoop, open_onnx
from buildlib.numerics.runners import Arrays, OnnxRunner
from buildlib.quantize.calibration import observe_ranges
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings
from suites.models import tiny_llama
from tests import outlier_llama
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import load_weights, logits

SHAPE = GraphShape(64, 192)


def text_tokens(n_tokens: int) -> list[int]:
    """Held-out text, which begins with bos."""
    tokenizer = load_tokenizer(tiny_llama.folder() / "tokenizer.json")
    text = tokenizer.encode(tiny_llama.heldout_text(), add_special_tokens=False).ids
    return [*Checkpoint.load(tiny_llama.folder()).config.begin, *text[: n_tokens - 1]]


def float_logits(folder: Path, out: Path, tokens: Sequence[int]) -> Logits:
    checkpoint = Checkpoint.load(folder)
    with open_onnx(export_onnx(checkpoint, SHAPE, out), checkpoint.config) as model:
        return np.concatenate([model.feed(tokens[:100]), model.feed(tokens[100:])])


def test_outliers_change_no_logit(outlier_model: Path, tmp_path: Path) -> None:
    tokens = text_tokens(160)
    plain = float_logits(tiny_llama.folder(), tmp_path / "plain", tokens)
    changed = float_logits(outlier_model, tmp_path / "changed", tokens)
    assert np.abs(plain - changed).max() <= 1e-5 * np.abs(plain).max()


def test_hidden_tokens_do_not_show_where_scores_lie_far_apart(tmp_path: Path) -> None:
    """As those of a Qwen 2.5 do. Queries a hundred times as large spread them over 2,000."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama.folder(), folder, ignore=shutil.ignore_patterns("lora", "ssd"))
    weights = load_file(folder / "model.safetensors")
    weights |= {name: one * 100 for name, one in weights.items() if "q_proj" in name}
    save_file(weights, folder / "model.safetensors")
    tokens = text_tokens(128)
    exact = logits(Architecture.load(folder), load_weights(folder), np.array(tokens))
    found = float_logits(folder, tmp_path / "out", tokens)
    assert np.abs(found - exact).max() <= 1e-3 * np.abs(exact).max()


def test_channels_of_a_bias_alone_keep_it(outlier_model: Path, tmp_path: Path) -> None:
    checkpoint, tokens = Checkpoint.load(outlier_model), text_tokens(64)
    model = export_onnx(checkpoint, SHAPE, tmp_path)
    encodings = complete_encodings(model, Encodings(), checkpoint.config, [tokens])
    name, channel = interface.past_key(0, "out"), outlier_llama.SLOW_CHANNEL
    grid = activation_grid(encodings.by_name()[name])
    keys: list[float] = []

    def see(outputs: Arrays, n_tokens: int) -> None:
        keys.extend(grid.dequantize(outputs[name][0, 0, channel, :n_tokens], 0).tolist())

    runner = OnnxRunner(apply_encodings(model, encodings, tmp_path / "qdq.onnx"))
    with HostLoop({SHAPE.ar: [runner]}, checkpoint.config, on_outputs=see) as loop:
        loop.feed(tokens)
    assert keys == pytest.approx([outlier_llama.KEY_BIAS] * len(tokens), abs=grid.scale[0])


def test_ranges_leave_massive_numbers_of_hidden_states_out(
    outlier_model: Path, tmp_path: Path
) -> None:
    config = Checkpoint.load(outlier_model).config
    model = export_onnx(Checkpoint.load(outlier_model), SHAPE, tmp_path)
    found = observe_ranges(model, config, [text_tokens(192)]).ranges()
    whole = observe_ranges(model, config, [text_tokens(192)], narrow=False).ranges()
    hidden = {name for name in found if found[name] != whole[name]}
    for layer in range(config.num_hidden_layers):
        assert max(map(abs, whole[interface.past_key(layer, "out")])) >= outlier_llama.KEY_BIAS
        assert whole[f"layer_{layer}_output"][1] == pytest.approx(outlier_llama.MASSIVE, rel=0.01)
        assert f"layer_{layer}_output" in hidden
    assert hidden >= {f"layer_0_{name}" for name in ("mlp_output", "down_proj")}
    assert max(found[name][1] for name in hidden) <= outlier_llama.MASSIVE / 4


def test_ranges_of_the_plain_model_are_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(tiny_llama.folder())
    model = export_onnx(checkpoint, SHAPE, tmp_path)
    found = observe_ranges(model, checkpoint.config, [text_tokens(192)])
    whole = observe_ranges(model, checkpoint.config, [text_tokens(192)], narrow=False)
    assert found.ranges() == whole.ranges()
