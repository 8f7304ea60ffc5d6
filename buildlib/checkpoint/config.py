"""The `config.json` of a decoder-only language model, as far as building it needs.

Keys and defaults: the configuration classes of Hugging Face transformers. What a rotary scaling
does to frequencies is in `buildlib.graph.rope`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from buildlib.checkpoint.architectures import (
    Family,
    QkNorm,
    SupportedLLMs,
    detect_architecture,
    family_of,
)
from buildlib.checkpoint.layout import read_json
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


class DynamicRopeScaling(BaseModel):
    """Another base for each length beyond `max_position_embeddings`; up to that no scaling."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["dynamic"]


class YarnRopeScaling(BaseModel):
    """Slow frequencies divided by the factor, fast ones kept, and sharper attention."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["yarn"]
    factor: float = Field(ge=1.0, allow_inf_nan=False)
    original_max_position_embeddings: int = Field(ge=1, le=1 << 24, strict=True)
    beta_fast: float = Field(default=32.0, gt=0.0, allow_inf_nan=False)
    beta_slow: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    attention_factor: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    mscale: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    mscale_all_dim: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    truncate: bool = True


Divisor = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class LongRopeScaling(BaseModel):
    """Every frequency divided by an own factor, of one list or another by the length of contexts.

    Attributes:
        short_factor: up to the original length.
        long_factor: beyond it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["longrope"]
    short_factor: tuple[Divisor, ...]
    long_factor: tuple[Divisor, ...]
    factor: float = Field(gt=0.0, allow_inf_nan=False)
    original_max_position_embeddings: int = Field(ge=2, le=1 << 24, strict=True)
    attention_factor: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)


RopeScaling = (
    LinearRopeScaling | Llama3RopeScaling | DynamicRopeScaling | YarnRopeScaling | LongRopeScaling
)
_KINDS = ("linear", "llama3", "dynamic", "yarn", "longrope")


def merged_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Bring `rope_theta`, `rope_scaling` and `partial_rotary_factor` under one spelling.

    Newer files keep all three in `rope_parameters`, older ones at the top, the scaling's kind as
    `rope_type` or `type`. No scaling is None.

    Raises:
        PydanticCustomError: of type `UNSUPPORTED`: a scaling that is not known.
    """
    merged: dict[str, Any] = {}
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and _LAYER_KINDS & set(parameters):
        parameters, merged = _by_layer_kind(parameters)
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
        merged["rope_scaling"] = _scaling(kind, scaling, config)
    return merged


_SLIDING = "sliding_attention"
_LAYER_KINDS = frozenset({"full_attention", _SLIDING})


def _by_layer_kind(parameters: Mapping[str, Any]) -> tuple[object, dict[str, Any]]:
    """Return rotary parameters of layers that see all, and the base of those with a window."""
    full, local = parameters.get("full_attention"), parameters.get(_SLIDING)
    if not isinstance(full, dict) or not isinstance(local, dict) or set(parameters) - _LAYER_KINDS:
        raise _unsupported("rope_parameters that differ between layers")
    if local.get("rope_type", "default") != "default":
        raise _unsupported("rope scaling of layers with a sliding window")
    return full, {"rope_local_base_freq": local.get("rope_theta")}


def _scaling(
    kind: object, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if kind == "default":
        return None
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):  # names in first Phi 3 files
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _KINDS:
        shown = repr(kind)
        raise _unsupported(f"rope scaling {shown if len(shown) <= 40 else shown[:37] + '...'}")
    filled = {key: value for key, value in scaling.items() if value is not None}
    filled["rope_type"] = kind
    if kind in {"yarn", "longrope"}:
        positions = config.get("max_position_embeddings")
        original = config.get("original_max_position_embeddings")
        if original is not None:
            filled["original_max_position_embeddings"] = original
        original = filled.setdefault("original_max_position_embeddings", positions)
        if type(positions) is int and type(original) is int and original > 0:
            filled.setdefault("factor", positions / original)
    return filled


def _unsupported(what: str) -> PydanticCustomError:
    return unsupported(f"{what} (known are {', '.join(_KINDS)})")


def unsupported(what: str) -> PydanticCustomError:
    """Make the validation error of a sound model that cannot be built."""
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": what})


_SPELLINGS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
Factor = Annotated[float, Field(gt=1e-9, lt=1e9)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class DecoderConfig(BaseModel):
    """Sizes and constants under the names of `config.json`; other keys are ignored.

    Attributes:
        architecture: the family, or None: unknown, and then built as its graph and keys say.
        partial_rotary_factor: share of `head_dim` that rotary positions turn, from its start.
        sliding_window: how many tokens back attention reaches, itself included; None for all.
        rope_local_base_freq: base of the frequencies in layers with a window; None: `rope_theta`,
            without `rope_scaling` only here.
        layer_types: for each layer `full_attention` or `sliding_attention`; None: all layers have
            the sliding window, if there is one.
        attention_bias: whether the projections to queries, keys and values have a bias.
        attention_out_bias: whether the projection after attention has one.
        use_parallel_residual: whether attention and MLP read the same norm.
        no_rope_layers: for each layer whether it *has* rotary positions, as files have it.
        attention_multiplier: factor of attention scores; None: `head_dim ** -0.5`.
        attn_logit_softcapping: c, for scores c * tanh(scores / c).
        final_logit_softcapping: the same for logits.
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
    rope_local_base_freq: float | None = Field(default=None, gt=1.0, allow_inf_nan=False)
    sliding_window: Size | None = None
    layer_types: tuple[Annotated[str, Field(max_length=100)], ...] | None = None
    tie_word_embeddings: bool = False
    hidden_act: Annotated[str, Field(max_length=100)] = "silu"
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    use_parallel_residual: bool = False
    no_rope_layers: tuple[bool, ...] | None = None
    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor | None = None
    logits_multiplier: Factor = 1.0
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
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
        family = family_of(filled["architecture"])
        for key, value in family.defaults.items():
            if filled.get(key) is None:
                filled[key] = value
        filled |= {ours: filled[key] for key, ours in family.spelled.items() if key in filled}
        filled["qk_norm"] = family.qk_norm
        filled |= {key: value(filled) for key, value in family.derived.items()}
        given = filled.get("hidden_act")
        if isinstance(given, str):
            filled["hidden_act"] = _SPELLINGS.get(given, given)
        heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
        if filled.get("num_key_value_heads") is None:
            filled["num_key_value_heads"] = heads
        if filled.get("head_dim") is None:
            filled["head_dim"] = _head_dim(hidden, heads)
        kinds = filled.get("layer_types")
        no_window = isinstance(kinds, list) and kinds and _SLIDING not in kinds
        if filled.get("use_sliding_window") is False or no_window:
            filled["sliding_window"] = None
        eos = filled.get("eos_token_id")
        if filled.get("bos_token_id") is None and not family.needs_bos:
            filled["bos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = {
            "num_attention_heads is not a multiple of num_key_value_heads": self.num_attention_heads
            % self.num_key_value_heads,
            "head_dim is odd": self.head_dim % 2,
            "partial_rotary_factor gives an odd number of rotary dimensions, or none": not (
                self.rotary_dim and self.rotary_dim % 2 == 0
            ),
            "rope_scaling needs a factor for every second rotary dimension": isinstance(
                self.rope_scaling, LongRopeScaling
            )
            and {len(self.rope_scaling.short_factor), len(self.rope_scaling.long_factor)}
            != {self.rotary_dim // 2},
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

    def context_limit(self, *, windowed: bool) -> tuple[int, str] | None:
        """Return the longest context that can be built, and why; None if the model bounds none.

        Args:
            windowed: whether the graph hides by itself what lies before the sliding window.
        """
        limits = []
        if self.sliding_window is not None and not windowed:
            why = f"the model looks back {self.sliding_window} tokens at most (sliding_window"
            limits.append((self.sliding_window, why))
        if isinstance(self.rope_scaling, DynamicRopeScaling):
            positions = self.max_position_embeddings
            why = f"beyond {positions} tokens rotary positions depend on the length (dynamic rope"
            limits.append((positions, why))
        return min(limits, default=None)

    @property
    def family(self) -> Family:
        """In what the model differs from Llama apart from its keys."""
        return family_of(self.architecture)

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        given = self.attention_multiplier
        return self.head_dim**-0.5 if given is None else given

    def has_window(self, layer: int) -> bool:
        """Return whether a layer looks back `sliding_window` tokens only."""
        if self.sliding_window is None:
            return False
        return self.layer_types is None or self.layer_types[layer] == _SLIDING

    def has_local_rope(self, layer: int) -> bool:
        """Return whether a layer turns queries and keys by frequencies of its own base."""
        return self.rope_local_base_freq is not None and self.has_window(layer)

    def has_rope(self, layer: int) -> bool:
        """Return whether a layer turns queries and keys by their positions."""
        return self.no_rope_layers is None or self.no_rope_layers[layer]


class CheckpointConfig(DecoderConfig):
    """Configuration of a checkpoint of a family that can be exported here."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:  # noqa: ANN401  (raw JSON)
        if isinstance(data, dict):
            reason = _refused_kind(data)
            if reason is not None:
                raise unsupported(f"{reason}; known are {', '.join(SupportedLLMs)}")
        return data

    @model_validator(mode="after")
    def _expressible(self) -> Self:
        if self.hidden_act not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise unsupported(f"hidden_act {self.hidden_act[:40]!r} (known are {known})")
        for key in ("no_rope_layers", "layer_types"):
            given = getattr(self, key)
            if given is not None and len(given) < self.num_hidden_layers:
                msg = f"{key} is shorter than num_hidden_layers"
                raise ValueError(msg)
        other = next((kind for kind in self.layer_types or () if kind not in _LAYER_KINDS), None)
        if other is not None:
            raise unsupported(f"layer_types {other[:40]!r} (known are {', '.join(_LAYER_KINDS)})")
        return self


_NO_DECODERS: Mapping[str, str] = {
    "is_encoder_decoder": "an encoder-decoder",
    "vision_config": "a model that sees",
    "audio_config": "a model that hears",
    "use_bidirectional_attention": "a model whose tokens see later ones",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "quantization_config": "a checkpoint that is quantized already",
}


def _refused_kind(data: Mapping[str, Any]) -> str | None:
    """Say why a configuration is of no model that can be exported; None if it may be."""
    architecture = detect_architecture(data)
    kind = repr(data.get("model_type"))
    shown = f"model_type {kind if len(kind) <= 40 else kind[:37] + '...'}"
    for key, what in _NO_DECODERS.items():
        given = data.get(key)
        if given is True or given not in (None, False, 0, 1):
            return f"{shown} is {what} ({key})"
    if architecture is not None:
        return family_of(architecture).refused(data)
    if any(data.get("model_type") == family.value for family in SupportedLLMs):
        return f"architectures of other kinds than {shown}"
    return f"{shown} is no family that can be exported"


def load_config(path: Path) -> DecoderConfig:
    """Read and check a `config.json`, of a known family or not.

    Raises:
        CheckpointError: missing, unreadable, or with sizes that make no sense.
        UnsupportedModelError: sound, but of a model that Genie cannot be told to run.
    """
    return _load(path, DecoderConfig)


def load_checkpoint_config(path: Path) -> CheckpointConfig:
    """Read and check the `config.json` of a checkpoint for export.

    Raises:
        CheckpointError: as `load_config`.
        UnsupportedModelError: also when our own export cannot express the model.
    """
    return _load(path, CheckpointConfig)


def _head_dim(hidden: object, heads: object) -> int | None:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # their own checks say more
    if hidden % heads:
        msg = "hidden_size is not a multiple of num_attention_heads, and there is no head_dim"
        raise ValueError(msg)
    return hidden // heads


_Config = TypeVar("_Config", bound=DecoderConfig)


def _load(path: Path, kind: type[_Config]) -> _Config:
    data = read_json(path)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = first_fault(error, kind)
        if fault.kind == UNSUPPORTED:
            raise UnsupportedModelError(path, fault.reason) from error
        if fault.kind == "literal_error":
            raise UnsupportedModelError(path, str(fault)) from error
        raise CheckpointError(path, str(fault)) from error
