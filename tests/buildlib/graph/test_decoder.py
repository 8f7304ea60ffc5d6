"""The float graph agrees with a forward pass in NumPy, and its caches with transformers'."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.feeds import CallInputs
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import logits

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, None])
def test_prefill_and_decode_equal_a_plain_forward_pass(
    dtype: npt.DTypeLike, make_checkpoint: Callable[..., Path], trained: Path, tmp_path: Path
) -> None:
    """Of random weights of a type, and of the trained model; `test_families.py` has float32."""
    folder = trained
    if dtype is not None:
        folder = make_checkpoint(tmp_path / "model", dtype, max_position_embeddings=96)
    checkpoint, out = Checkpoint.load(folder), tmp_path / "out"
    tokens = [0, *np.random.default_rng(1).integers(0, 300, 40).tolist()]
    prefill = export_onnx(checkpoint, GraphShape(16, 96), out)
    decode = convert_arcl(prefill, GraphShape(1, 96), out / "decode.onnx")
    chains = {ar: [OnnxRunner(path, n_threads=1)] for ar, path in ((16, prefill), (1, decode))}
    with HostLoop(chains, checkpoint.config) as loop:
        calls = [loop.feed(tokens[:-2]), loop.feed(tokens[-2:-1]), loop.feed(tokens[-1:])]
    weights = {name: ref.numpy().astype(np.float32) for name, ref in checkpoint.tensors.items()}
    expected = logits(Architecture.load(folder), weights, np.array(tokens))
    np.testing.assert_allclose(np.concatenate(calls), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["torchscript-qwen2", "torchscript-qwen3"])
def test_qwen_computes_logits_and_cache_of_transformers(name: str, tmp_path: Path) -> None:
    sample = np.load(EXPORTS / name / "sample.npz")
    checkpoint = Checkpoint.load(EXPORTS / name)
    n = sample["tokens"].shape[1]
    path = export_onnx(checkpoint, GraphShape(n, 2 * n), tmp_path)
    feed = CallInputs(checkpoint.config, 2 * n).at(n, 0, sample["tokens"][0].tolist())
    shapes = interface.input_shapes(checkpoint.config, GraphShape(n, 2 * n))
    empty = {k: np.zeros(shape, np.float32) for k, shape in shapes.items() if k not in feed}
    outputs = OnnxRunner(path, n_threads=1).run(feed | empty)
    np.testing.assert_allclose(outputs["logits"][0], sample["logits"][0], rtol=0, atol=2e-5)
    for layer in range(checkpoint.config.num_hidden_layers):
        keys = outputs[interface.past_key(layer, "out")][:, 0].transpose(0, 2, 1)
        values = outputs[interface.past_value(layer, "out")][:, 0]
        np.testing.assert_allclose(keys, sample[f"key_{layer}"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(values, sample[f"value_{layer}"], rtol=0, atol=1e-5)


def test_weights_are_used_in_place(tiny: Path, tmp_path: Path) -> None:
    model = export_onnx(Checkpoint.load(tiny), GraphShape(16, 96), tmp_path / "out")
    assert model.with_name("model.safetensors").samefile(tiny / "model.safetensors")
    assert model.stat().st_size < 50_000
    assert sorted(p.name for p in model.parent.iterdir()) == ["model.onnx", "model.safetensors"]
