"""The `config.json` of a Llama checkpoint, as far as the graph needs it."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.errors import CheckpointError, UnsupportedModelError

_MAX_CONFIG_BYTES = 1 << 20

Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class Llama3RopeScaling(BaseModel):
    """The `llama3` frequency scaling of RoPE, under the names of `config.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["llama3"]
    factor: float = Field(ge=1.0, allow_inf_nan=False)
    low_freq_factor: float = Field(gt=0.0, allow_inf_nan=False)
    high_freq_factor: float = Field(gt=0.0, allow_inf_nan=False)
    original_max_position_embeddings: Size

    @model_validator(mode="after")
    def _ordered(self) -> "Llama3RopeScaling":
        if self.high_freq_factor <= self.low_freq_factor:
            msg = "high_freq_factor must be above low_freq_factor"
            raise ValueError(msg)
        return self


class LlamaConfig(BaseModel):
    """Sizes and constants of a Llama, under the names of `config.json`; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["llama"]
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
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    bos_token_id: TokenId
    eos_token_id: TokenId | tuple[TokenId, ...]

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:  # noqa: ANN401  (raw JSON)
        """Fill what the library that writes these files leaves out when it is the default."""
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        parameters = filled.get("rope_parameters")  # the newer spelling, scaling and theta in one
        if isinstance(parameters, dict):
            filled.setdefault("rope_theta", parameters.get("rope_theta", 10000.0))
            if parameters.get("rope_type", "default") != "default":
                filled.setdefault("rope_scaling", parameters)
        scaling = filled.get("rope_scaling")
        if isinstance(scaling, dict):
            if "rope_type" not in scaling and "type" in scaling:
                scaling = scaling | {"rope_type": scaling["type"]}
            default = scaling.get("rope_type") == "default"
            filled["rope_scaling"] = None if default else scaling
        heads = filled.get("num_attention_heads")
        if filled.get("num_key_value_heads") is None:
            filled["num_key_value_heads"] = heads
        hidden = filled.get("hidden_size")
        if filled.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int):
            filled["head_dim"] = hidden // heads if heads > 0 else None
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> "LlamaConfig":
        problems = {
            "num_attention_heads is no multiple of num_key_value_heads": self.num_attention_heads
            % self.num_key_value_heads,
            "head_dim is odd": self.head_dim % 2,
            "bos_token_id lies outside the vocabulary": self.bos_token_id >= self.vocab_size,
            "eos_token_id lies outside the vocabulary": any(
                token >= self.vocab_size for token in self.eos_token_ids
            ),
            "eos_token_id is empty": not self.eos_token_ids,
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


def load_config(path: Path) -> LlamaConfig:
    """Read and check a `config.json`.

    Raises:
        CheckpointError: missing, unreadable, or with sizes that make no sense.
        UnsupportedModelError: sound, but of a model that the graph cannot express.
    """
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(path, "larger than any config.json")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not valid JSON ({error})") from error
    try:
        return LlamaConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=True)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "literal_error":
            feature = f"{where} = {_short(first['input'])} ({first['msg']})"
            raise UnsupportedModelError(path, feature) from error
        reason = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise CheckpointError(path, reason) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
