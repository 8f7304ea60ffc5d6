"""The model in numpy float32, for checking.

It is written apart from the torch model and from any ONNX graph made of the checkpoint, so that
agreement between them means something.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.tokens import Ids

Array = NDArray[np.float32]


def load_weights(folder: Path) -> dict[str, Array]:
    """Return the checkpoint's tensors, widened from fp16."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def logits(architecture: Architecture, weights: Mapping[str, Array], ids: Ids) -> Array:
    """Return scores of the next token, `[length, vocab]`, after each of `ids` `[length]`."""
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding[ids]
    for index in range(architecture.num_hidden_layers):
        prefix = f"model.layers.{index}."
        hidden = hidden + _attention(
            architecture,
            weights,
            f"{prefix}self_attn.",
            _norm(architecture, hidden, weights[f"{prefix}input_layernorm.weight"]),
        )
        normed = _norm(architecture, hidden, weights[f"{prefix}post_attention_layernorm.weight"])
        hidden = hidden + _mlp(weights, f"{prefix}mlp.", normed)
    scores: Array = _norm(architecture, hidden, weights["model.norm.weight"]) @ embedding.T
    return scores


def _norm(architecture: Architecture, hidden: Array, weight: Array) -> Array:
    mean_square = np.mean(hidden * hidden, axis=-1, keepdims=True)
    scale: Array = np.sqrt(mean_square + np.float32(architecture.rms_norm_eps))
    return weight * hidden / scale


def _mlp(weights: Mapping[str, Array], prefix: str, hidden: Array) -> Array:
    gate = hidden @ weights[f"{prefix}gate_proj.weight"].T
    up = hidden @ weights[f"{prefix}up_proj.weight"].T
    mixed: Array = (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}down_proj.weight"].T
    return mixed


def _attention(
    architecture: Architecture, weights: Mapping[str, Array], prefix: str, hidden: Array
) -> Array:
    """Apply causal attention to the whole of `hidden` `[length, hidden_size]`, head by head."""
    size = architecture.head_dim
    group = architecture.num_attention_heads // architecture.num_key_value_heads
    queries, keys, values = (hidden @ weights[f"{prefix}{part}_proj.weight"].T for part in "qkv")
    future = np.triu(np.full((len(hidden), len(hidden)), -np.inf, dtype=np.float32), k=1)
    heads = []
    for head in range(architecture.num_attention_heads):
        own = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        query = _rotated(architecture, queries[:, own])
        key = _rotated(architecture, keys[:, shared])
        heads.append(
            _softmax(query @ key.T / np.float32(np.sqrt(size)) + future) @ values[:, shared]
        )
    return np.concatenate(heads, axis=-1) @ weights[f"{prefix}o_proj.weight"].T


def _rotated(architecture: Architecture, head: Array) -> Array:
    """Apply RoPE to one head `[length, head_dim]`: element i turns with element i + head_dim/2."""
    half = architecture.head_dim // 2
    frequencies = architecture.rope_theta ** (-np.arange(half) / half)
    angles = np.outer(np.arange(len(head)), frequencies)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = head[:, :half], head[:, half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares
