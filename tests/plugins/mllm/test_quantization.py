"""Quantized checkpoints, judged by mllm's graph in NumPy and by the float models."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.checkpoint.config import load_checkpoint_config
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.errors import InputFileError, InvalidOptionError, ModelFileError
from buildlib.targets import find_soc
from plugins.mllm.config import AotConfig, Family, ModelConfig, make_configs
from plugins.mllm.contents import check_contents, expected_tensors
from plugins.mllm.quantization import Technique, quantize_checkpoint
from plugins.mllm.tensors import Tensor, read_safetensors
from suites.models import tiny_llama
from tests.buildlib.conftest import MakeCheckpoint
from tests.buildlib.model_folders import LLAMA3_SCALING
from tests.campaigns import say
from tests.plugins.mllm.numpy_graph import NumpyGraph
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import load_weights, logits

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_CL = 96


@dataclass(frozen=True)
class _Quantized:
    checkpoint: Path
    path: Path
    model: ModelConfig
    aot: AotConfig

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return read_safetensors(self.path)

    def graph(self, *, float_weights: bool = False, rounds: bool = True) -> NumpyGraph:
        weights = load_file(self.checkpoint / "model.safetensors") if float_weights else None
        family = self.aot.quant_recipe.builtin_llm_pass.model
        return NumpyGraph(self.tensors, self.model, family, weights, rounds)


def _quantize(
    checkpoint: Path,
    text: str,
    folder: Path,
    technique: Technique = "none",
    head_bits: Literal[4, 8, 16] = 4,
    n_samples: int = 2,
) -> _Quantized:
    config = load_checkpoint_config(checkpoint / "config.json")
    soc = find_soc("SM8650")
    model, aot = make_configs(config, soc, cl=_CL, block_size=16, head_bits=head_bits)
    path = folder / "model.safetensors"
    quantize_checkpoint(
        checkpoint, model, aot, text, path, n_samples=n_samples, technique=technique
    )
    return _Quantized(checkpoint, path, model, aot)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., _Quantized]:
    """`quantized(head_bits)`: the reference model, each way once."""

    @functools.cache
    def make(head_bits: Literal[4, 8, 16]) -> _Quantized:
        folder, text = tmp_path_factory.mktemp("quantized"), tiny_llama.calibration_text()
        return _quantize(tiny_llama.folder(), text, folder, head_bits=head_bits)

    return make


@pytest.fixture(scope="module")
def reference(quantized: Callable[..., _Quantized]) -> _Quantized:
    return quantized(4)


def _heldout(length: int) -> list[int]:
    tokenizer = load_tokenizer(tiny_llama.folder() / "tokenizer.json")
    ids: list[int] = tokenizer.encode(tiny_llama.heldout_text(), add_special_tokens=False).ids
    return ids[:length]


def _sqnr(ours: np.ndarray, reference: np.ndarray) -> float:
    return float(10 * np.log10((reference**2).sum() / ((ours - reference) ** 2).sum()))


def test_mllms_graph_on_grids_of_the_file_is_the_float_model(reference: _Quantized) -> None:
    ids = _heldout(_CL)
    architecture = Architecture.load(tiny_llama.folder())
    expected = logits(architecture, load_weights(tiny_llama.folder()), np.array(ids))
    exact = reference.graph(float_weights=True, rounds=False).logits(ids)
    np.testing.assert_allclose(exact, expected, atol=1e-3)
    assert _sqnr(reference.graph(float_weights=True).logits(ids), expected) > 30
    whole = reference.graph().logits(ids)
    assert (whole.argmax(-1) == expected.argmax(-1)).mean() > 0.8


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_every_family_computes_like_its_float_model(
    family: Family, make_checkpoint: MakeCheckpoint, tiny_text: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / family, model_type=family, **_SIZES)
    made = _quantize(checkpoint, tiny_text, tmp_path)
    expected = expected_tensors(made.model, made.aot)
    assert set(made.tensors) == set(expected)
    check_contents(made.path, made.tensors, made.model, made.aot)
    assert ("model.layers.0.self_attn.q_proj.bias" in expected) == (family == "qwen2")
    ids = load_tokenizer(checkpoint / "tokenizer.json").encode(tiny_text).ids[:64]  # after bos
    exact = made.graph(float_weights=True, rounds=False).logits(ids)
    assert _sqnr(made.graph(float_weights=True).logits(ids), exact) > 30
    assert _sqnr(made.graph().logits(ids), exact) > 8


def test_what_is_joined_lies_on_one_grid(reference: _Quantized) -> None:
    tensors = reference.tensors

    def load(grid: str, kind: str) -> np.ndarray:
        return tensors[f"model.layers.3.self_attn.{grid}_qdq.fake_quant.{kind}"].load()

    for which, kind in itertools.product("qk", ("scale", "zero_point")):
        assert load(f"{which}_proj_output", kind) == load(f"{which}_rope_neg_half", kind)
    assert load("k_cast_to_int8", "zero_point") == load("v_cast_to_int8", "zero_point") == 128


@pytest.mark.variant
def test_the_table_of_techniques(tmp_path: Path) -> None:
    """What plugins/mllm/aot.md has, over ten held-out windows; `pytest -s` prints it."""
    ids, text = _heldout(10 * _CL), tiny_llama.calibration_text()
    windows = [ids[start : start + _CL] for start in range(0, len(ids), _CL)]
    ways: tuple[tuple[Technique, Literal[4, 8]], ...] = (("none", 4), ("gptaq", 4), ("gptaq", 8))
    found: list[tuple[float, float, float]] = []
    for technique, bits in ways:
        made = _quantize(tiny_llama.folder(), text, tmp_path, technique, bits, n_samples=32)
        exact = _logits(made.graph(float_weights=True, rounds=False), windows)
        if not found:
            rounded = _logits(made.graph(float_weights=True), windows)
            say(f"float {_perplexity(exact, windows):.3f}; activations and cache alone "
                f"{_perplexity(rounded, windows):.3f}, {_sqnr(rounded, exact):.1f} dB")  # fmt: skip
        whole = _logits(made.graph(), windows)
        agree = float((whole.argmax(-1) == exact.argmax(-1)).mean())
        found.append((_perplexity(whole, windows), _sqnr(whole, exact), agree))
        value, sqnr_db, agree = found[-1]
        say(f"{technique}, head of {bits} bits: {value:.3f}, {sqnr_db:.1f} dB, {agree:.1%}")
    none, gptaq, with_head = found
    assert gptaq[0] < none[0]
    assert none[1:] < gptaq[1:] < with_head[1:]


def _logits(graph: NumpyGraph, windows: list[list[int]]) -> np.ndarray:
    return np.stack([graph.logits(window) for window in windows])


def _perplexity(rows: np.ndarray, windows: list[list[int]]) -> float:
    rows, following = rows[:, :-1].astype(np.float64), np.array(windows)[:, 1:, None]
    shifted = rows - rows.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, following, -1)[..., 0]
    return float(np.exp((np.log(np.exp(shifted).sum(-1)) - chosen).mean()))


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.variant)])
def test_keys_and_values_of_8_bits_hold_outliers(
    family: Family, make_checkpoint: MakeCheckpoint, tiny_text: str, tmp_path: Path
) -> None:
    """The rows of a rotary pair of keys, and of a channel of values, are a hundred times as large.

    The norm of a Qwen 3's keys takes that of its projection away, so its gain is as large.
    """
    checkpoint = make_checkpoint(tmp_path / family, model_type=family, **_SIZES)
    weights = load_file(checkpoint / "model.safetensors")
    for name, array in weights.items():
        factor = 0.01 if ".q_" in name or ".o_" in name else 100.0
        if "_norm.weight" in name and ".self_attn." in name:
            array[[2, 10]] *= factor
        elif name.endswith("o_proj.weight"):
            array.reshape(len(array), -1, 16)[..., 3] *= factor
        elif name.endswith("v_proj.weight"):
            array.reshape(-1, 16, array.shape[-1])[:, 3] *= factor
        elif name.endswith(("q_proj.weight", "k_proj.weight")) and family == "llama":
            array.reshape(-1, 16, array.shape[-1])[:, [2, 10]] *= factor
    save_file(weights, checkpoint / "model.safetensors")
    ids = load_tokenizer(checkpoint / "tokenizer.json").encode(tiny_text).ids[:64]
    made = _quantize(checkpoint, tiny_text, tmp_path, "gptq", 16)
    exact = made.graph(float_weights=True, rounds=False).logits(ids)
    assert _sqnr(made.graph().logits(ids), exact) > 10  # not rescaled: 0.07 and 0.75


def test_scaled_rotations_are_those_of_the_checkpoint(
    make_checkpoint: MakeCheckpoint, tiny_text: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama3", rope_scaling=LLAMA3_SCALING, **_SIZES)
    made = _quantize(checkpoint, tiny_text, tmp_path)
    assert made.model.rope_scaling == LLAMA3_SCALING
    plain = made.model.model_copy(update={"rope_scaling": None})
    with pytest.raises(InvalidOptionError, match="rope_scaling"):
        quantize_checkpoint(checkpoint, plain, made.aot, tiny_text, made.path)
    cos = made.graph().rotations("cos")
    slowest = 10000.0 ** (-14 / 16) / 8.0
    np.testing.assert_allclose(cos[:, 7], np.cos(np.arange(_CL) * slowest), atol=1e-4)
    np.testing.assert_array_equal(cos[:, 15], cos[:, 7])


@pytest.mark.parametrize("bits", [8, 16])
def test_the_head_has_its_bits(
    reference: _Quantized, bits: Literal[8, 16], quantized: Callable[..., _Quantized]
) -> None:
    made = quantized(bits)
    check_contents(made.path, made.tensors, made.model, made.aot)
    weights = load_weights(tiny_llama.folder())["model.embed_tokens.weight"]
    assert _sqnr(made.graph().weight("lm_head"), weights) > {8: 35, 16: 80}[bits]
    with pytest.raises(InputFileError, match="tensor lm_head"):
        check_contents(made.path, made.tensors, reference.model, reference.aot)


def test_a_file_of_another_block_size_or_context_is_told_apart(reference: _Quantized) -> None:
    tensors = dict(reference.tensors)
    check_contents(reference.path, tensors, reference.model, reference.aot)
    longer = reference.model.model_copy(update={"max_cache_length": 128})
    with pytest.raises(InputFileError, match="CL of 96, and max_cache_length is 128"):
        check_contents(reference.path, tensors, longer, reference.aot)
    wider = reference.model.model_copy(update={"linear_block_size": 32})
    with pytest.raises(InputFileError, match="blocks are of 16, and linear_block_size is 32"):
        check_contents(reference.path, tensors, wider, reference.aot)
    del tensors["model.norm.scale"]
    with pytest.raises(InputFileError, match=r"model\.norm\.scale is missing"):
        check_contents(reference.path, tensors, reference.model, reference.aot)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mlp_bias": True}, "no bias"),
        ({"hidden_act": "gelu"}, "SiLU"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32,
          "max_window_layers": 0}, "sliding window"),
    ],
)  # fmt: skip
def test_models_that_mllms_graph_cannot_be_are_refused(
    changes: dict[str, object],
    reason: str,
    make_checkpoint: MakeCheckpoint,
    tiny_text: str,
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", **(_SIZES | changes))
    with pytest.raises(ModelFileError, match=reason):
        _quantize(checkpoint, tiny_text, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_configuration_of_another_model_is_refused(reference: _Quantized, tmp_path: Path) -> None:
    other = reference.model.model_copy(update={"rope_theta": 500000.0})
    out = tmp_path / "model.safetensors"
    with pytest.raises(InvalidOptionError, match=r"rope_theta.*500000"):
        quantize_checkpoint(reference.checkpoint, other, reference.aot, "text", out)
