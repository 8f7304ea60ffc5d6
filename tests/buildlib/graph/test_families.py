"""Every family's checkpoint gives the logits that transformers computes from it."""

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import external_tensors, load_model
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner
from tests.buildlib import families

CL, AR = 32, 8


def prefill_and_decode(
    folder: Path, out: Path, tokens: list[int], n_prefill: int
) -> npt.NDArray[np.float32]:
    checkpoint = Checkpoint.load(folder)
    model = export_onnx(checkpoint, GraphShape(AR, CL), out)
    decode = convert_arcl(model, GraphShape(1, CL), out / "decode.onnx")
    chains = {ar: [OnnxRunner(path, n_threads=1)] for ar, path in ((AR, model), (1, decode))}
    with HostLoop(chains, checkpoint.config) as loop:
        steps = [loop.feed(tokens[:n_prefill])]
        steps += [loop.feed([token]) for token in tokens[n_prefill:]]
    return np.concatenate(steps)


@pytest.mark.parametrize("name", families.RECIPES)
def test_prefill_and_ten_decode_steps_equal_transformers(name: str, tmp_path: Path) -> None:
    config, tokens, expected = families.load_family(name)
    folder = families.write_checkpoint(tmp_path / "model", config)
    logits = prefill_and_decode(folder, tmp_path / "out", tokens, families.N_PREFILL)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_baichuan_is_a_llama_with_packed_projections_and_rows_of_length_one(tmp_path: Path) -> None:
    config, tokens, _ = families.load_family("llama-biases")
    plain = {**config, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    plain["num_key_value_heads"] = 4
    packed = {**plain, "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    baichuan = families.write_checkpoint(tmp_path / "baichuan", packed)
    tensors = dict(load_file(baichuan / "model.safetensors"))
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn"
        parts = np.split(tensors.pop(f"{stem}.W_pack.weight"), 3)
        tensors |= {f"{stem}.{n}_proj.weight": part for n, part in zip("qkv", parts, strict=True)}
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head / np.linalg.norm(head, axis=1, keepdims=True)
    llama = families.write_checkpoint(tmp_path / "llama", plain)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, llama / "model.safetensors")
    logits = [
        prefill_and_decode(folder, tmp_path / f"{folder.name}_out", tokens, families.N_PREFILL)
        for folder in (baichuan, llama)
    ]
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-5)


def test_fused_projections_stay_in_their_file(tmp_path: Path) -> None:
    config, _, _ = families.load_family("phi3")
    folder = families.write_checkpoint(tmp_path / "model", config)
    out = export_onnx(Checkpoint.load(folder), GraphShape(AR, CL), tmp_path / "out")
    stored = {Path(tensor.path).name for tensor in external_tensors(load_model(out))}
    names = {str(tensor.name) for tensor in external_tensors(load_model(out))}
    assert stored == {"model.safetensors"}
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"} <= names
    assert out.stat().st_size < 40_000


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("name", families.RECIPES)
def test_the_files_are_what_transformers_computes(name: str) -> None:
    config, tokens, expected = families.load_family(name)
    again, tokens_again, logits = families.compute(name)
    volatile = {"transformers_version"}
    assert {k: v for k, v in again.items() if k not in volatile} == {
        k: v for k, v in config.items() if k not in volatile
    }
    assert tokens_again == tokens
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
