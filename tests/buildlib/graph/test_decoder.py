"""The float graph agrees with an independent forward pass."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.rope import rope_tables
from buildlib.graph.shape import GraphShape
from buildlib.numerics.feeds import CallInputs
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"

Array = npt.NDArray[np.float64]


def forward(checkpoint: Checkpoint, tokens: list[int]) -> Array:
    """Logits [n, vocab] in float64, head by head, without caches."""
    config = checkpoint.config
    weights = {name: ref.numpy().astype(np.float64) for name, ref in checkpoint.tensors.items()}
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = norm(hidden, own["input_layernorm.weight"], config)
        hidden = hidden + attention(normed, own, config)
        normed = norm(hidden, own["post_attention_layernorm.weight"], config)
        gate = normed @ own["mlp.gate_proj.weight"].T
        up = normed @ own["mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    normed = norm(hidden, weights["model.norm.weight"], config)
    return np.asarray(normed @ checkpoint.lm_head.numpy().astype(np.float64).T)


def norm(x: Array, weight: Array, config: CheckpointConfig) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight)


def attention(x: Array, own: dict[str, Array], config: CheckpointConfig) -> Array:
    n, dim = len(x), config.head_dim
    half = dim // 2
    inverse = config.rope_theta ** (-np.arange(half) * 2 / dim)
    angles = np.arange(n)[:, None] * inverse
    cos, sin = np.cos(angles), np.sin(angles)

    def rotate(v: Array) -> Array:
        a, b = v[:, :half], v[:, half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    heads = []
    for head in range(config.num_attention_heads):
        kv = head // config.group_size
        q = rotate(projected(x, own, "q")[:, head * dim : (head + 1) * dim])
        k = rotate(projected(x, own, "k")[:, kv * dim : (kv + 1) * dim])
        v = projected(x, own, "v")[:, kv * dim : (kv + 1) * dim]
        scores = q @ k.T / np.sqrt(dim) + np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    return projected(np.concatenate(heads, axis=1), own, "o")


def projected(x: Array, own: dict[str, Array], which: str) -> Array:
    bias = own.get(f"self_attn.{which}_proj.bias", np.zeros(1))
    return np.asarray(x @ own[f"self_attn.{which}_proj.weight"].T + bias)


def loop_logits(
    folder: Path, out: Path, shapes: list[GraphShape], tokens: list[int]
) -> npt.NDArray[np.float32]:
    checkpoint = Checkpoint.load(folder)
    model = export_onnx(checkpoint, shapes[0], out)
    paths = [convert_arcl(model, shape, out / f"{shape}.onnx") for shape in shapes]
    chains = {s.ar: [OnnxRunner(p, n_threads=1)] for s, p in zip(shapes, paths, strict=True)}
    with HostLoop(chains, checkpoint.config) as loop:
        first = loop.feed(tokens[:-2])
        return np.concatenate([first, loop.feed(tokens[-2:-1]), loop.feed(tokens[-1:])])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_prefill_and_decode_equal_a_plain_forward_pass(
    make_checkpoint: Callable[..., Path], tmp_path: Path, dtype: npt.DTypeLike
) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype, tie_word_embeddings=dtype != np.float32)
    tokens = [0, *np.random.default_rng(1).integers(0, 300, 40).tolist()]
    shapes = [GraphShape(16, 96), GraphShape(1, 96)]
    logits = loop_logits(folder, tmp_path / "out", shapes, tokens)
    np.testing.assert_allclose(logits, forward(Checkpoint.load(folder), tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"model_type": "mistral", "sliding_window": 96}, {"attention_bias": True}]
)
def test_relatives_of_llama_equal_a_plain_forward_pass(
    make_checkpoint: Callable[..., Path], tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = make_checkpoint(tmp_path / "model", **changes)
    tokens = [0, *range(50, 70)]
    logits = loop_logits(folder, tmp_path / "out", [GraphShape(16, 96), GraphShape(1, 96)], tokens)
    np.testing.assert_allclose(logits, forward(Checkpoint.load(folder), tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["torchscript-qwen2", "torchscript-qwen3"])
def test_qwen_equals_transformers_token_by_token_with_its_cache(name: str, tmp_path: Path) -> None:
    """The logits, keys and values are those that transformers computed in torch."""
    folder = EXPORTS / name
    sample = np.load(folder / "sample.npz")
    tokens = sample["tokens"][0].tolist()
    logits = loop_logits(folder, tmp_path, [GraphShape(4, 16), GraphShape(1, 16)], tokens)
    np.testing.assert_allclose(logits, sample["logits"][0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["torchscript-qwen2", "torchscript-qwen3"])
def test_qwen_fills_its_cache_as_transformers_does(name: str, tmp_path: Path) -> None:
    folder = EXPORTS / name
    sample = np.load(folder / "sample.npz")
    checkpoint = Checkpoint.load(folder)
    n = sample["tokens"].shape[1]
    path = export_onnx(checkpoint, GraphShape(n, 2 * n), tmp_path)
    feed = CallInputs(checkpoint.config, 2 * n).at(n, 0, sample["tokens"][0].tolist())
    shapes = interface.input_shapes(checkpoint.config, GraphShape(n, 2 * n))
    empty = {k: np.zeros(shape, np.float32) for k, shape in shapes.items() if k not in feed}
    outputs = OnnxRunner(path, n_threads=1).run(feed | empty)
    for layer in range(checkpoint.config.num_hidden_layers):
        keys = outputs[interface.past_key(layer, "out")][:, 0].transpose(0, 2, 1)
        values = outputs[interface.past_value(layer, "out")][:, 0]
        np.testing.assert_allclose(keys, sample[f"key_{layer}"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(values, sample[f"value_{layer}"], rtol=0, atol=1e-5)


def test_the_trained_model_equals_a_plain_forward_pass(trained: Path, tmp_path: Path) -> None:
    tokens = [0, *range(100, 150)]
    logits = loop_logits(trained, tmp_path, [GraphShape(32, 192), GraphShape(1, 192)], tokens)
    expected = forward(Checkpoint.load(trained), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_weights_are_used_in_place(tiny: Path, tmp_path: Path) -> None:
    model = export_onnx(Checkpoint.load(tiny), GraphShape(16, 96), tmp_path / "out")
    linked = model.parent / "model.safetensors"
    assert linked.samefile(tiny / "model.safetensors")
    assert model.stat().st_size < 50_000
    assert sorted(p.name for p in model.parent.iterdir()) == ["model.onnx", "model.safetensors"]


def test_llama3_scaling_keeps_fast_and_slows_slow_frequencies() -> None:
    plain = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 500000.0,
    }
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain_sin = rope_tables(CheckpointConfig.model_validate(plain), 2)[1][1]
    scaled_sin = rope_tables(CheckpointConfig.model_validate(plain | {"rope_scaling": scaling}), 2)[
        1
    ][1]
    assert scaled_sin[0] == plain_sin[0]
    assert scaled_sin[-1] == pytest.approx(plain_sin[-1] / 8, rel=1e-6)
    ratios = scaled_sin / plain_sin
    assert np.all(np.diff(ratios) <= 1e-6)
