"""The `config.json` of a decoder-only language model, as far as building it needs.

Keys, defaults and the meaning of null are those of Hugging Face transformers, family by family
(`family_keys`, `architectures`, `rotary`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from buildlib.checkpoint.architectures import (
    Family,
    QkNorm,
    SupportedLLMs,
    detect_architecture,
    family_of,
)
from buildlib.checkpoint.family_keys import (
    agreed_reading,
    family_keys,
    releases_of,
    stated_major,
    tell_difference,
)
from buildlib.checkpoint.layout import read_json
from buildlib.checkpoint.rotary import (
    FULL,
    KINDS,
    SLIDING,
    UNSUPPORTED,
    DynamicRopeScaling,
    LongRopeScaling,
    RopeScaling,
    read_rotary,
    unsupported,
)
from buildlib.error_base import one_line
from buildlib.errors import ModelFileError
from buildlib.validation import first_fault

_SPELLINGS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}
NO_BOS = -1
"""`bos_token_id` of models whose texts begin without such a token, as Genie has it."""
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_LAYER_KINDS = (FULL, SLIDING)

Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Scale = Annotated[float, Field(gt=1e-9, lt=1e9)]
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
        bos_token_id: of the file. In the folders that stages hand on it is what the tokenizer puts
            before a text (`tokenizer.write_configuration`); None, -1 in the file, for nothing.
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
    tie_word_embeddings: Flag = False
    hidden_act: Annotated[str, Field(max_length=100)] = "silu"
    attention_bias: Flag = False
    attention_out_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: QkNorm | None = None
    use_parallel_residual: Flag = False
    no_rope_layers: tuple[bool, ...] | None = None
    embedding_multiplier: Scale = 1.0
    residual_multiplier: Scale = 1.0
    attention_multiplier: Scale | None = None
    logits_multiplier: Scale = 1.0
    attn_logit_softcapping: Scale | None = None
    final_logit_softcapping: Scale | None = None
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Field(min_length=1)]
    bos_token_id: TokenId | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:  # noqa: ANN401  (raw JSON)
        """Read the keys as the library does that writes these files."""
        if not isinstance(data, dict):
            return data
        architecture = detect_architecture(data)
        if architecture is None:
            values = _read_unknown(data)
        else:
            values = agreed_reading(data, lambda major: _read(data, architecture, major))
        values["architecture"] = architecture
        activation = values.get("hidden_act")
        if isinstance(activation, str):
            values["hidden_act"] = _SPELLINGS.get(activation, activation)
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        if values.get("head_dim") is None:
            values["head_dim"] = _head_dim(hidden, heads)
        kinds = values.get("layer_types")
        if isinstance(kinds, list) and kinds and SLIDING not in kinds:
            values["sliding_window"] = None
        if values.get("bos_token_id") == NO_BOS:
            values["bos_token_id"] = None
        return {key: value for key, value in values.items() if value is not None or key in data}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = {
            "num_attention_heads is not a multiple of num_key_value_heads": self.num_attention_heads
            % self.num_key_value_heads,
            "layer_types has layers with a sliding window, and sliding_window is null": (
                self.architecture is not None
                and self.sliding_window is None
                and SLIDING in (self.layer_types or ())
            ),
            "head_dim is odd": self.head_dim % 2,
            "partial_rotary_factor gives an odd number of rotary dimensions, or none": not (
                self.rotary_dim and self.rotary_dim % 2 == 0
            ),
            "rope_scaling needs a factor for every second rotary dimension": isinstance(
                self.rope_scaling, LongRopeScaling
            )
            and {len(self.rope_scaling.short_factor), len(self.rope_scaling.long_factor)}
            != {self.rotary_dim // 2},
            "bos_token_id lies outside the vocabulary": any(
                token >= self.vocab_size for token in self.begin
            ),
            "eos_token_id lies outside the vocabulary": any(
                token >= self.vocab_size for token in self.eos_token_ids
            ),
        }
        for problem, present in problems.items():
            if present:
                raise ValueError(problem)
        return self

    @property
    def begin(self) -> tuple[int, ...]:
        """Tokens before a text: that of bos, or none."""
        return () if self.bos_token_id is None else (self.bos_token_id,)

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
            windowed: whether the graph hides by itself the slots before the sliding window.
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
        """The differences of the model from Llama apart from its keys."""
        return family_of(self.architecture)

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        factor = self.attention_multiplier
        return self.head_dim**-0.5 if factor is None else factor

    def has_window(self, layer: int) -> bool:
        """Return whether a layer looks back `sliding_window` tokens only."""
        if self.sliding_window is None:
            return False
        return self.layer_types is None or self.layer_types[layer] == SLIDING

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
            names = ", ".join(_ACTIVATIONS)
            raise unsupported(f"hidden_act {self.hidden_act[:40]!r} (known are {names})")
        layers = self.num_hidden_layers
        if self.no_rope_layers is not None and len(self.no_rope_layers) < layers:
            msg = "no_rope_layers is shorter than num_hidden_layers"
            raise ValueError(msg)
        if self.layer_types is not None and len(self.layer_types) != layers:
            msg = f"layer_types has {len(self.layer_types)} entries for {layers} layers"
            raise ValueError(msg)
        other = next((kind for kind in self.layer_types or () if kind not in _LAYER_KINDS), None)
        if other is not None:
            raise unsupported(f"layer_types {other[:40]!r} (known are {', '.join(_LAYER_KINDS)})")
        return self


def _read(file: Mapping[str, Any], architecture: SupportedLLMs, major: int) -> dict[str, Any]:
    """Return the values of `DecoderConfig` that a family's code takes from a file."""
    family, table = family_of(architecture), family_keys(architecture, major)
    positions = {**table.ignored, **table.defaults}.get("max_position_embeddings")
    keys = {"max_position_embeddings": file.get("max_position_embeddings", positions)}
    keys |= {**table.read(file, major), "transformers": major}
    values = {key: value for key, value in keys.items() if key in DecoderConfig.model_fields}
    values |= {ours: keys[key] for key, ours in family.spelled.items()}
    values["qk_norm"] = family.qk_norm
    values |= {key: value(keys) for key, value in family.derived.items()}
    if "rope_theta" in table.defaults:
        defaults = {**table.defaults, "max_position_embeddings": positions}
        rotary = read_rotary(file, defaults, major=major, kinds=family.scalings)
        values |= rotary
        if not family.partial_rotary:
            ignored = major == 5 and rotary["rope_scaling"] is None
            if not ignored and rotary["partial_rotary_factor"] not in (None, 1):
                reason = f"partial_rotary_factor, which {table.class_name} cannot apply"
                raise unsupported(reason, by_transformers=True)
            values["partial_rotary_factor"] = 1.0
    values["model_type"] = architecture.value
    return values


def _read_unknown(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file of no known family, its usual keys having their usual meaning."""
    values = {key: value for key, value in file.items() if key in DecoderConfig.model_fields}
    by_kind = file.get("rope_parameters")
    nested = isinstance(by_kind, dict) and not by_kind.keys().isdisjoint({FULL, SLIDING})
    defaults = {"rope_theta": 1e4, "rope_local_base_freq": 1e4} if nested else {"rope_theta": 1e4}
    scalings: tuple[str, ...] = KINDS
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(file.get(name), dict) and "short_factor" in file[name]:
            scalings = ("longrope",)
    values |= read_rotary(file, defaults, major=5, kinds=scalings)
    if file.get("use_sliding_window") is False:
        values["sliding_window"] = None
    values["attention_out_bias"] = file.get("attention_bias", False)
    return {key: value for key, value in values.items() if value is not None}


_NO_DECODERS: Mapping[str, str] = {
    "quantization_config": "a checkpoint that is quantized already",
    "is_encoder_decoder": "an encoder-decoder",
    "use_bidirectional_attention": "a model whose tokens see later ones",
    "vision_config": "a model that sees",
    "audio_config": "a model that hears",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}
_OF_ANY_FAMILY = ("quantization_config", "is_encoder_decoder")


def _refused_kind(data: Mapping[str, Any]) -> str | None:
    """Say why a configuration is of no model that can be exported; None if it may be."""
    architecture = detect_architecture(data)
    kind = f"model_type {one_line(repr(data.get('model_type')), 40)}"
    for key, description in _NO_DECODERS.items():
        value = data.get(key)
        counts = architecture is None or key in _OF_ANY_FAMILY or _is_read(data, architecture, key)
        if counts and (value is True or value not in (None, False, 0, 1)):
            return f"{kind} is {description} ({key})"
    if architecture is not None:
        return family_of(architecture).refused(data)
    if any(data.get("model_type") == family.value for family in SupportedLLMs):
        return f"architectures of other kinds than {kind}"
    return f"{kind} is no family that can be exported"


def _is_read(data: Mapping[str, Any], architecture: SupportedLLMs, key: str) -> bool:
    stated = stated_major(data)
    majors = (major for major in releases_of(architecture) if stated in {None, major})
    return any(key in family_keys(architecture, major).defaults for major in majors)


def unread_keys(path: Path) -> tuple[str, list[str]]:
    """Return the class of a `config.json`'s model, and the keys that its code does not read."""
    data = read_json(path)
    architecture = detect_architecture(data) if isinstance(data, dict) else None
    if architecture is None:
        return "", []
    releases = releases_of(architecture)
    release = stated_major(data) or releases[0]
    if release not in releases:
        return "", []
    table = family_keys(architecture, release)
    return table.class_name, table.unread(data)


def other_reading(path: Path, major: int) -> str | None:
    """Describe how transformers `major` reads a `config.json` that another major wrote.

    Returns:
        The key that differs, or the reason of a refusal; None where they read the same.
    """
    data = read_json(path)
    architecture = detect_architecture(data) if isinstance(data, dict) else None
    if architecture is None or stated_major(data) in {None, min(max(major, 4), 5)}:
        return None
    try:
        return tell_difference(*(_read(data, architecture, each) for each in (4, 5)))
    except PydanticCustomError as error:
        return error.message()


def load_config(path: Path) -> DecoderConfig:
    """Read and check a `config.json`, of a known family or not."""
    return _load(path, DecoderConfig)


def load_checkpoint_config(path: Path) -> CheckpointConfig:
    """Read and check the `config.json` of a checkpoint, which our own export must express."""
    return _load(path, CheckpointConfig)


def _head_dim(hidden: object, heads: object) -> int | None:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # their own checks say more
    if hidden % heads:
        msg = "hidden_size is not a multiple of num_attention_heads, and there is no head_dim"
        raise ValueError(msg)
    return hidden // heads


_Model = TypeVar("_Model", bound=BaseModel)
_Config = TypeVar("_Config", bound=DecoderConfig)


def read_object(path: Path, kind: type[_Model]) -> _Model:
    """Read a JSON file of a model folder as a pydantic model."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        raise ModelFileError(path, str(first_fault(error, kind))) from error


def _load(path: Path, kind: type[_Config]) -> _Config:
    return _check(read_json(path), path, kind)


def check_checkpoint_config(data: object, path: Path) -> CheckpointConfig:
    """Check the content of a `config.json` that another file stands for."""
    return _check(data, path, CheckpointConfig)


def _check(data: object, path: Path, kind: type[_Config]) -> _Config:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = first_fault(error, kind)
        reason = f"unsupported: {fault.reason}" if fault.kind == UNSUPPORTED else str(fault)
        raise ModelFileError(path, reason) from error
