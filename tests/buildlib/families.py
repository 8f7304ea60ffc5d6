"""Small random models of every family, and what transformers computes for them.

    python -m tests.buildlib.families [NAME ...]

writes `tests/fixtures/families/NAME.json` (`config.json` as transformers writes it) and `NAME.npz`
(tokens, and the logits after each) where torch and transformers are installed. Baichuan, which
transformers does not have, is computed in numpy. Weights are in no
file: they follow from the name and shape of each tensor, so that tests make them without torch.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from buildlib.checkpoint.checkpoint import expected_tensors
from buildlib.checkpoint.config import CheckpointConfig
from tests.buildlib.configurations import reference
from tests.buildlib.model_folders import write_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "families"
N_PREFILL, N_DECODE = 14, 10

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}


def _longrope(original: int) -> dict[str, Any]:
    """Return Phi 4's form of LongRoPE: on three quarters of each head, original length outside."""
    lists = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.2, 3.0, 5.0]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    sizes = {"original_max_position_embeddings": original, "max_position_embeddings": 128}
    return {"rope_parameters": scaling | lists, **sizes}


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5": ("Ernie4_5", {"use_bias": True, "head_dim": 12}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 10,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "phi3-longrope": ("Phi3", _longrope(original=64)),
    "phi3-longrope-beyond": ("Phi3", _longrope(original=8)),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "qwen3-yarn": (
        "Qwen3",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 10, "head_dim": 12}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": 64}),
    "seed_oss": ("SeedOss", {"head_dim": 12, "attention_out_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": True},
    ),
}
"""Classes of transformers without `Config` and `ForCausalLM`, and changes of `_SIZES`."""

BAICHUAN: dict[str, Any] = {
    **_SIZES,
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "num_key_value_heads": 4,
}
"""`config.json` of the family that transformers has no model of; it comes with code of its own."""


random_tensor = partial(reference.random_tensor, spread=0.1)


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a random checkpoint, with a tokenizer of a character for each token."""
    read = CheckpointConfig.model_validate(config)
    tensors = {name: random_tensor(name, dims) for name, dims in expected_tensors(read).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    write_tokenizer(folder, read.vocab_size, read.bos_token_id)
    return folder


def family_config(name: str) -> dict[str, Any]:
    """Return `config.json` of a family."""
    return BAICHUAN if name == "baichuan" else load_family(name)[0]


def load_family(name: str) -> tuple[dict[str, Any], list[int], npt.NDArray[np.float32]]:
    """Return `config.json`, tokens, and the logits [n, vocab] of transformers."""
    sample = np.load(FIXTURES / f"{name}.npz")
    config = json.loads((FIXTURES / f"{name}.json").read_text())
    return config, sample["tokens"].tolist(), sample["logits"]


def baichuan_logits(tokens: list[int]) -> npt.NDArray[np.float64]:
    """Return the logits [n, vocab] of Baichuan 2 7B after each token, in numpy.

    The formulas are those of `modeling_baichuan.py` beside the published weights: one projection to
    queries, keys and values (`W_pack`), rotated halves, and rows of the output projection that are
    divided by their lengths (`NormHead`).
    """
    sizes, n, heads = BAICHUAN, len(tokens), BAICHUAN["num_attention_heads"]
    hidden, inner, vocab = (
        sizes[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    dim = hidden // heads
    angles = np.outer(np.arange(n), 10000.0 ** (-np.arange(0, dim, 2) / dim))
    angles = np.concatenate([angles, angles], axis=1)

    def weight(name: str, *shape: int) -> npt.NDArray[np.float64]:
        return random_tensor(f"{name}.weight", shape).astype(np.float64)

    def normed(rows: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        lengths = np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
        return np.asarray(rows / lengths * weight(name, hidden))

    def rotated(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        turned = np.concatenate([-rows[..., dim // 2 :], rows[..., : dim // 2]], axis=-1)
        return np.asarray(rows * np.cos(angles) + turned * np.sin(angles))

    state = weight("model.embed_tokens", vocab, hidden)[tokens]
    for index in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        packed = normed(state, f"{layer}.input_layernorm")
        packed = packed @ weight(f"{layer}.self_attn.W_pack", 3 * hidden, hidden).T
        query, key, value = packed.reshape(n, 3, heads, dim).transpose(1, 2, 0, 3)
        scores = rotated(query) @ rotated(key).transpose(0, 2, 1) / np.sqrt(dim)
        scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        attended = (scores / scores.sum(-1, keepdims=True)) @ value
        attended = attended.transpose(1, 0, 2).reshape(n, hidden)
        state = state + attended @ weight(f"{layer}.self_attn.o_proj", hidden, hidden).T
        rows = normed(state, f"{layer}.post_attention_layernorm")
        gate, up = (
            rows @ weight(f"{layer}.mlp.{name}_proj", inner, hidden).T for name in ("gate", "up")
        )
        down = weight(f"{layer}.mlp.down_proj", hidden, inner)
        state = state + (gate / (1 + np.exp(-gate)) * up) @ down.T
    head = weight("lm_head", vocab, hidden)
    head /= np.linalg.norm(head, axis=1, keepdims=True)
    return np.asarray(normed(state, "model.norm") @ head.T)


def compute(name: str) -> tuple[dict[str, Any], list[int], npt.NDArray[np.float32]]:
    """Return what `load_family` does, as transformers computes it now."""
    import torch
    import transformers

    stem, changes = RECIPES[name]
    kind = "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
    config = getattr(transformers, kind)(**(_SIZES | changes))
    config.architectures = [f"{stem}ForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(random_tensor(key, tuple(weight.shape))))
        tokens = np.random.default_rng(5).integers(3, _SIZES["vocab_size"], N_PREFILL + N_DECODE)
        ids = torch.from_numpy(tokens)[None]
        output = model.eval()(ids[:, :N_PREFILL], use_cache=True)
        logits = [output.logits[0]]
        for position in range(N_PREFILL, len(tokens)):
            step = ids[:, position : position + 1]
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits[0])
    return config.to_diff_dict(), tokens.tolist(), torch.cat(logits).numpy()


def main(names: list[str]) -> None:
    """Write the files of the named models, or of all."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in names or RECIPES:
        config, tokens, logits = compute(name)
        text = json.dumps(config, indent=1, sort_keys=True) + "\n"
        (FIXTURES / f"{name}.json").write_text(text)
        np.savez_compressed(FIXTURES / f"{name}.npz", tokens=np.array(tokens), logits=logits)


if __name__ == "__main__":
    main(sys.argv[1:])
