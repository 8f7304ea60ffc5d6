"""The `config.json` of a decoder-only language model, as far as building it needs.

Keys and defaults: the configuration classes of Hugging Face transformers. Rotary scaling is read as
far as Genie has it: Genie 1.21 takes `longrope` too, but which of its two lists it uses at which
length is not documented; it does not take `dynamic`, `su` or `yarn` as files write them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from buildlib.checkpoint.architectures import SupportedLLMs, detect_architecture
from buildlib.errors import CheckpointError, UnsupportedModelError
from buildlib.validation import first_fault

UNSUPPORTED = "unsupported"
"""Type of validation errors about sound models that cannot be built."""


class LinearRopeScaling(BaseModel):
    """Every frequency divided by the factor."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["linear"]
    factor: float = Field(ge=1.0, allow_inf_nan=False)


class Llama3RopeScaling(BaseModel):
    """Slow frequencies divided by the factor, fast ones kept, those between blended."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["llama3"]
    factor: float = Field(ge=1.0, allow_inf_nan=False)
    low_freq_factor: float = Field(gt=0.0, allow_inf_nan=False)
    high_freq_factor: float = Field(gt=0.0, allow_inf_nan=False)
    original_max_position_embeddings: int = Field(ge=1, le=1 << 24, strict=True)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            msg = "high_freq_factor must be above low_freq_factor"
            raise ValueError(msg)
        return self


RopeScaling = LinearRopeScaling | Llama3RopeScaling
_KINDS = ("linear", "llama3")


def merged_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` under one spelling.

    Newer files keep all three in `rope_parameters`, older ones at the top, the scaling's kind as
    `rope_type` or `type`. No scaling is None.

    Raises:
        PydanticCustomError: of type `UNSUPPORTED`: a scaling that Genie cannot be told.
    """
    merged: dict[str, Any] = {}
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        if any(isinstance(value, dict) for value in parameters.values()):
            raise _unsupported("rope_parameters that differ between layers")
        if "rope_type" in parameters or "type" in parameters:
            merged["rope_scaling"] = parameters
        for key in ("rope_theta", "partial_rotary_factor"):
            if parameters.get(key) is not None:
                merged[key] = parameters[key]
    merged |= {
        key: config[key]
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factor")
        if config.get(key) is not None
    }
    scaling = merged.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        merged["rope_scaling"] = _scaling(kind, scaling)
    return merged


def _scaling(kind: object, scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        shown = repr(kind)
        raise _unsupported(f"rope scaling {shown if len(shown) <= 40 else shown[:37] + '...'}")
    return {**scaling, "rope_type": kind}


def _unsupported(what: str) -> PydanticCustomError:
    return unsupported(f"{what} (known are {', '.join(_KINDS)})")


def unsupported(what: str) -> PydanticCustomError:
    """Make the validation error of a sound model that cannot be built."""
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": what})


_MAX_CONFIG_BYTES = 1 << 20
_ATTENTION_BIAS = {SupportedLLMs.LLAMA, SupportedLLMs.QWEN3, None}
_BEGINS_WITH_BOS = {SupportedLLMs.LLAMA, SupportedLLMs.MISTRAL, SupportedLLMs.PHI3}

Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class DecoderConfig(BaseModel):
    """Sizes and constants under the names of `config.json`; other keys are ignored.

    Attributes:
        architecture: the family, or None: unknown, and then built as its graph and keys say.
        partial_rotary_factor: share of `head_dim` that rotary positions turn, from its start.
        sliding_window: how many tokens back attention reaches, itself included; None for all.
        bos_token_id: what a text begins with. Families without such a token (Qwen) or unknown
            ones may leave it out; it is then the first of `eos_token_id`, the token that stood
            before every text in training.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Annotated[str, Field(max_length=100, pattern=r"^[\w. -]*$")] = "unknown"
    architecture: SupportedLLMs | None = None
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024, strict=True)]
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Size
    max_position_embeddings: Size = 2048
    rms_norm_eps: float = Field(default=1e-6, gt=0.0, lt=1.0)
    rope_theta: float = Field(default=10000.0, gt=1.0, allow_inf_nan=False)
    rope_scaling: RopeScaling | None = Field(default=None, discriminator="rope_type")
    partial_rotary_factor: float = Field(default=1.0, gt=0.0, le=1.0)
    sliding_window: Size | None = None
    tie_word_embeddings: bool = False
    hidden_act: Annotated[str, Field(max_length=100)] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Field(min_length=1)]
    bos_token_id: TokenId

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:  # noqa: ANN401  (raw JSON)
        """Fill what the library that writes these files leaves out when it is the default."""
        if not isinstance(data, dict):
            return data
        rope = ("rope_theta", "rope_scaling", "partial_rotary_factor")
        filled = {key: value for key, value in data.items() if key not in rope}
        filled |= merged_rope(data)
        filled["architecture"] = detect_architecture(data)
        heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
        if filled.get("num_key_value_heads") is None:
            filled["num_key_value_heads"] = heads
        if filled.get("head_dim") is None:
            filled["head_dim"] = _head_dim(hidden, heads)
        if filled.get("use_sliding_window") is False:
            filled["sliding_window"] = None
        eos = filled.get("eos_token_id")
        if filled.get("bos_token_id") is None and filled["architecture"] not in _BEGINS_WITH_BOS:
            filled["bos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = {
            "num_attention_heads is no multiple of num_key_value_heads": self.num_attention_heads
            % self.num_key_value_heads,
            "head_dim is odd": self.head_dim % 2,
            "partial_rotary_factor gives an odd number of rotary dimensions, or none": not (
                self.rotary_dim and self.rotary_dim % 2 == 0
            ),
            "bos_token_id lies outside the vocabulary": self.bos_token_id >= self.vocab_size,
            "eos_token_id lies outside the vocabulary": any(
                token >= self.vocab_size for token in self.eos_token_ids
            ),
        }
        for problem, present in problems.items():
            if present:
                raise ValueError(problem)
        return self

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text; a file may hold one or a list."""
        ids = self.eos_token_id
        return ids if isinstance(ids, tuple) else (ids,)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotary positions turn; there are half as many cosines."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have a bias; in Qwen 2 always."""
        return self.output_bias or self.architecture is SupportedLLMs.QWEN2

    @property
    def output_bias(self) -> bool:
        """Whether the projection after attention has a bias; some families know no such key."""
        return self.attention_bias and self.architecture in _ATTENTION_BIAS

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head, before their rotation."""
        return self.architecture is SupportedLLMs.QWEN3


class LlamaConfig(DecoderConfig):
    """Configuration of a checkpoint that can be exported here: Llama and its like."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_act: Literal["silu"] = "silu"
    mlp_bias: Literal[False] = False

    @model_validator(mode="after")
    def _expressible(self) -> Self:
        if self.architecture is None:
            raise unsupported(f"architectures of other kinds than model_type {self.model_type!r}")
        if self.rotary_dim != self.head_dim:
            raise unsupported(f"partial_rotary_factor = {self.partial_rotary_factor}")
        return self


def load_config(path: Path) -> DecoderConfig:
    """Read and check a `config.json`, of a known family or not.

    Raises:
        CheckpointError: missing, unreadable, or with sizes that make no sense.
        UnsupportedModelError: sound, but of a model that Genie cannot be told to run.
    """
    return _load(path, DecoderConfig)


def load_checkpoint_config(path: Path) -> LlamaConfig:
    """Read and check the `config.json` of a checkpoint for export.

    Raises:
        CheckpointError: as `load_config`.
        UnsupportedModelError: also when our own export cannot express the model.
    """
    return _load(path, LlamaConfig)


def _head_dim(hidden: object, heads: object) -> int | None:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # their own checks say more
    if hidden % heads:
        msg = "hidden_size is no multiple of num_attention_heads, and there is no head_dim"
        raise ValueError(msg)
    return hidden // heads


_Config = TypeVar("_Config", bound=DecoderConfig)


def _load(path: Path, kind: type[_Config]) -> _Config:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(path, "larger than any config.json")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not valid JSON ({error})") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = first_fault(error, kind)
        if fault.kind == UNSUPPORTED:
            raise UnsupportedModelError(path, fault.reason) from error
        if fault.kind == "literal_error":
            raise UnsupportedModelError(path, str(fault)) from error
        raise CheckpointError(path, str(fault)) from error
