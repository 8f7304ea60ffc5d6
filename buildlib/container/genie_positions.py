"""Positions of tokens: rotary with their scalings, and the other encodings.

Keys: "Genie Dialog JSON configuration", docs.qualcomm.com 80-63442-10, and those that libGenie 1.21
requires when it creates a dialog.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.config_model import (
    WRITTEN,
    Count32,
    GenieBlock,
    Positive,
    Size32,
    Text,
    refuse,
)

RopeType = Literal[
    "default", "linear", "llama3", "longrope", "qwen2vl-mrope", "qwen3vl-mrope", "proportional"
]
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "llama3": (
        "factor",
        "low-freq-factor",
        "high-freq-factor",
        "original-max-position-embeddings",
    ),
    "longrope": ("factor", "original-max-position-embeddings", "short-factor", "long-factor"),
}
_MROPE = ("qwen2vl-mrope", "qwen3vl-mrope")
_SCALINGS_OF: Mapping[str, tuple[str, ...]] = {
    "low-freq-factor": ("llama3",),
    "high-freq-factor": ("llama3",),
    "short-factor": ("longrope",),
    "long-factor": ("longrope",),
    "mrope-section": _MROPE,
    "time-step": _MROPE,
    "spatial-merge-size": _MROPE,
    "partial-rotary-factor": ("proportional",),
}


class RopeScaling(GenieBlock):
    """Scaling of rotary positions, as `rope_scaling` in a checkpoint's `config.json`.

    Attributes:
        short_factor: of each rotary dimension, within the original context length (longrope).
        long_factor: the same beyond it.
        mrope_section: rotary dimensions of time, height and width, for models that see.
        partial_rotary_factor: part of the head's dimensions that turn (proportional).
    """

    rope_type: RopeType
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count32 | None = None
    short_factor: tuple[Positive, ...] | None = None
    long_factor: tuple[Positive, ...] | None = None
    mrope_section: tuple[Size32, Size32, Size32] | None = None
    time_step: Count32 | None = None
    spatial_merge_size: Count32 | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _keys_are_of_the_type(self) -> Self:
        for key in _NEEDED_BY.get(self.rope_type, ()):
            if getattr(self, key.replace("-", "_")) is None:
                raise refuse(f"it is missing: {self.rope_type} needs it", key, kind="missing")
        for key, types in _SCALINGS_OF.items():
            is_set = getattr(self, key.replace("-", "_")) is not None
            if is_set and self.rope_type not in types:
                raise refuse(f"it belongs to {' and '.join(types)}, not to {self.rope_type}", key)
        return self

    def dimensions(self) -> dict[str, int]:
        """Return the rotary dimensions that its lists are made for, by key."""
        lengths = {}
        for key, factors in (
            ("short-factor", self.short_factor),
            ("long-factor", self.long_factor),
        ):
            if factors is not None:
                lengths[key] = len(factors)
        if self.mrope_section is not None:
            lengths["mrope-section"] = sum(self.mrope_section)
        return lengths


class PositionalEncoding(GenieBlock):
    """Positions of tokens; `rope_dim` is half of the dimensions of a head that turn.

    `absolute` hands `position_ids` to the graph, as encoders want them.

    Attributes:
        prefix: stands before the names of the inputs that take cosines and sines; so layers can
            turn by several bases.
    """

    type: Annotated[Literal["rope", "alibi", "absolute", "none"], WRITTEN] = "rope"
    rope_dim: Count32 | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeScaling | None = None
    prefix: Text | None = None

    @model_validator(mode="after")
    def _rope_keys_are_of_rope(self) -> Self:
        keys = {
            "rope-dim": self.rope_dim,
            "rope-theta": self.rope_theta,
            "rope-scaling": self.rope_scaling,
        }
        for key, value in keys.items():
            if value is not None and self.type != "rope":
                raise refuse(f"positions of type {self.type} have no {key}", key)
        lists = self.rope_scaling.dimensions() if self.rope_scaling else {}
        for key, n in lists.items():
            if self.rope_dim is not None and n != self.rope_dim:
                reason = f"it is made for {n} rotary dimensions, and rope-dim is {self.rope_dim}"
                raise refuse(reason, "rope-scaling", key)
        return self
