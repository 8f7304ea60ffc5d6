"""The model in torch, for training: a function of named parameters, as Hugging Face computes it."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from tools.tiny_llama.architecture import Architecture

Parameters = Mapping[str, Tensor]
"""Keys and shapes are those of `Architecture.tensor_shapes`."""


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
    table = parameters["model.embed_tokens.weight"]
    rotation = _rotation(architecture, torch.arange(ids.shape[1]))
    hidden = F.embedding(ids, table)
    for index in range(architecture.num_hidden_layers):
        layer = _layer_parameters(parameters, index)
        normed = rms_norm(architecture, hidden, layer["input_layernorm.weight"])
        hidden = hidden + _attention(architecture, layer, normed, rotation)
        normed = rms_norm(architecture, hidden, layer["post_attention_layernorm.weight"])
        hidden = hidden + _mlp(layer, normed)
    return F.linear(rms_norm(architecture, hidden, parameters["model.norm.weight"]), table)


def _layer_parameters(parameters: Parameters, index: int) -> dict[str, Tensor]:
    """Return parameters of one decoder layer, without the prefix of its number."""
    prefix = f"model.layers.{index}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in parameters.items()
        if name.startswith(prefix)
    }


def rms_norm(architecture: Architecture, hidden: Tensor, weight: Tensor) -> Tensor:
    """Normalize the last dimension."""
    return F.rms_norm(hidden, weight.shape, weight, architecture.rms_norm_eps)


def _rotation(architecture: Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[1, length, head_dim]`, each frequency once for both halves."""
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
) -> Tensor:
    def heads(name: str) -> Tensor:
        flat = F.linear(hidden, layer[f"self_attn.{name}.weight"])
        return flat.unflatten(-1, (-1, architecture.head_dim)).transpose(1, 2)

    group = architecture.num_attention_heads // architecture.num_key_value_heads
    mixed = F.scaled_dot_product_attention(
        _rotate(heads("q_proj"), *rotation),
        _rotate(heads("k_proj"), *rotation).repeat_interleave(group, dim=1),
        heads("v_proj").repeat_interleave(group, dim=1),
        is_causal=True,
    )
    return F.linear(mixed.transpose(1, 2).flatten(2), layer["self_attn.o_proj.weight"])


def _mlp(layer: Parameters, hidden: Tensor) -> Tensor:
    gate = F.silu(F.linear(hidden, layer["mlp.gate_proj.weight"]))
    up = F.linear(hidden, layer["mlp.up_proj.weight"])
    return F.linear(gate * up, layer["mlp.down_proj.weight"])
