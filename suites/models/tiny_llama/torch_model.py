"""The model in torch, for training: a function of named parameters, as Hugging Face computes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from suites.models.tiny_llama.architecture import Architecture

Parameters = Mapping[str, Tensor]
"""Keys and shapes are those of `Architecture.tensor_shapes`."""

Cache = tuple[Tensor, Tensor]
"""Rotated keys and values of a layer, each `[batch, n_kv, length, head_dim]`."""


@dataclass(frozen=True)
class Seen:
    """Keys and values before those of the tokens, and who sees what.

    Attributes:
        keys: rotated, `[batch, n_kv, earlier, head_dim]`.
        values: of the same shape.
        mask: true where a token sees a key, `[batch, 1, length, earlier + length]`.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


def initial_parameters(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Return random float32 parameters.

    Norms are 1, the rest is normal; what adds to the residual stream is smaller by its depth.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 1 / math.sqrt(2 * architecture.num_hidden_layers)
    parameters = {}
    for name, shape in architecture.tensor_shapes().items():
        if len(shape) == 1:
            tensor = torch.ones(shape)
        else:
            scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensor = torch.randn(shape, generator=generator) * (0.02 * scale)
        parameters[name] = tensor.requires_grad_()
    return parameters


def logits(architecture: Architecture, parameters: Parameters, ids: Tensor) -> Tensor:
    """Return scores of the next token `[batch, length, vocab]` for `ids` `[batch, length]`."""
    hidden, _ = hidden_states(architecture, parameters, ids)
    return F.linear(hidden, parameters["model.embed_tokens.weight"])


def hidden_states(
    architecture: Architecture, parameters: Parameters, ids: Tensor
) -> tuple[Tensor, list[Cache]]:
    """Return hidden states after the final norm `[batch, length, hidden]`, and each layer's cache.

    The output projection takes them; Genie calls them `last_hidden_states`.
    """
    positions = torch.arange(ids.shape[1])
    hidden = F.embedding(ids, parameters["model.embed_tokens.weight"])
    caches = []
    for index in range(architecture.num_hidden_layers):
        layer = layer_parameters(parameters, index)
        hidden, cache = decoder_layer(architecture, layer, hidden, positions)
        caches.append(cache)
    return rms_norm(architecture, hidden, parameters["model.norm.weight"]), caches


def layer_parameters(parameters: Parameters, index: int) -> dict[str, Tensor]:
    """Return parameters of one decoder layer, without the prefix of its number."""
    prefix = f"model.layers.{index}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in parameters.items()
        if name.startswith(prefix)
    }


def decoder_layer(
    architecture: Architecture,
    layer: Parameters,
    hidden: Tensor,
    positions: Tensor,
    seen: Seen | None = None,
) -> tuple[Tensor, Cache]:
    """Return hidden states `[batch, length, hidden]` after one layer, and its keys and values.

    Args:
        architecture: sizes of the model.
        layer: its parameters, as `layer_parameters` gives them.
        hidden: before the layer.
        positions: of the tokens, `[length]` or `[batch, length]`.
        seen: earlier keys and values, and what each token may see; without it, attention is causal.
    """
    normed = rms_norm(architecture, hidden, layer["input_layernorm.weight"])
    mixed, cache = _attention(architecture, layer, normed, _rotation(architecture, positions), seen)
    hidden = hidden + mixed
    normed = rms_norm(architecture, hidden, layer["post_attention_layernorm.weight"])
    return hidden + _mlp(layer, normed), cache


def rms_norm(architecture: Architecture, hidden: Tensor, weight: Tensor) -> Tensor:
    """Normalize the last dimension."""
    return F.rms_norm(hidden, weight.shape, weight, architecture.rms_norm_eps)


def _rotation(architecture: Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[..., 1, length, head_dim]`, each frequency once for both halves."""
    half = torch.arange(0, architecture.head_dim, 2) / architecture.head_dim
    angles = positions[..., None] * architecture.rope_theta**-half
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE as Hugging Face lays it out: element i is paired with i + head_dim/2."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin


def _attention(
    architecture: Architecture,
    layer: Parameters,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    seen: Seen | None,
) -> tuple[Tensor, Cache]:
    def heads(name: str) -> Tensor:
        flat = F.linear(hidden, layer[f"self_attn.{name}.weight"])
        return flat.unflatten(-1, (-1, architecture.head_dim)).transpose(1, 2)

    made = _rotate(heads("k_proj"), *rotation), heads("v_proj")
    keys, values = made
    if seen is not None:
        keys = torch.cat((seen.keys, keys), dim=2)
        values = torch.cat((seen.values, values), dim=2)
    group = architecture.num_attention_heads // architecture.num_key_value_heads
    mixed = F.scaled_dot_product_attention(
        _rotate(heads("q_proj"), *rotation),
        keys.repeat_interleave(group, dim=1),
        values.repeat_interleave(group, dim=1),
        attn_mask=None if seen is None else seen.mask,
        is_causal=seen is None,
    )
    return F.linear(mixed.transpose(1, 2).flatten(2), layer["self_attn.o_proj.weight"]), made


def _mlp(layer: Parameters, hidden: Tensor) -> Tensor:
    gate = F.silu(F.linear(hidden, layer["mlp.gate_proj.weight"]))
    up = F.linear(hidden, layer["mlp.up_proj.weight"])
    return F.linear(gate * up, layer["mlp.down_proj.weight"])
