"""The interface that Qualcomm's exports share: additive mask, cosines and sines, transposed keys.

Names as in the public configuration and code of AI Hub Models: `attention_mask` [1, 1, AR, CL],
`position_ids_cos`, `position_ids_sin` [1, 1, AR, rope/2], `past_key_<i>_in` [n_kv, 1, head_dim,
CL-AR], `past_value_<i>_in` [n_kv, 1, CL-AR, head_dim]; outputs carry new entries only.
"""

from dataclasses import dataclass
from typing import Any

import torch

HIDDEN = -50.0
"""Additive mask of what must not be seen."""


@dataclass(frozen=True)
class Cache:
    """Key and value of each layer in turn, the newest entries at the end."""

    tensors: list[torch.Tensor]

    @classmethod
    def empty(cls, config: Any, past: int) -> "Cache":  # noqa: ANN401
        """Return zeros for `past` tokens."""
        heads, size = config.num_key_value_heads, head_dim(config)
        shapes = [(heads, 1, size, past), (heads, 1, past, size)] * config.num_hidden_layers
        return cls([torch.zeros(shape) for shape in shapes])

    def grown(self, new: list[torch.Tensor]) -> "Cache":
        """Return a cache with new entries at its end, and as many of the oldest gone."""
        grown = []
        for index, (old, entry) in enumerate(zip(self.tensors, new, strict=True)):
            axis = 2 if index % 2 else 3
            both = torch.cat([old, entry], axis)
            grown.append(both.narrow(axis, entry.shape[axis], old.shape[axis]))
        return Cache(grown)


def head_dim(config: Any) -> int:  # noqa: ANN401
    """Return the size of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def names(config: Any) -> tuple[list[str], list[str]]:  # noqa: ANN401
    """Return the names of inputs and outputs, in order."""
    kinds = [
        f"past_{kind}_{layer}"
        for layer in range(config.num_hidden_layers)
        for kind in ("key", "value")
    ]
    fixed = ["input_ids", "attention_mask", "position_ids_cos", "position_ids_sin"]
    return [*fixed, *(f"{k}_in" for k in kinds)], ["logits", *(f"{k}_out" for k in kinds)]


def mask(done: int, ar: int, cl: int) -> torch.Tensor:
    """Return a mask, zero where token i may look: the last `done` entries and new ones up to i."""
    seen = torch.zeros(ar, cl, dtype=torch.bool)
    seen[:, cl - ar - done : cl - ar] = True
    seen[:, cl - ar :] = torch.ones(ar, ar).tril().bool()
    return torch.where(seen, 0.0, HIDDEN)[None, None]


def rope(config: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Return cosines and sines [1, 1, AR, head_dim/2] of unscaled rotary embeddings."""
    size = head_dim(config)
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, size, 2).double() / size)
    angles = positions.double()[:, None] * frequencies
    return angles.cos().float()[None, None], angles.sin().float()[None, None]
