"""Families of models that build from a checkpoint: one entry each, by the keys of `config.json`.

A family is Llama with differences, and an entry states only those: keys under other names, values
that follow from keys, and differences of its layers. `family_keys` has the keys that it reads at
all, with their defaults. `DecoderConfig` reads the keys through both and `buildlib.graph.decoder`
writes every difference; neither knows a family by name.

A model of no such family may build all the same from ONNX, by its graph. A family stands here once
its logits are checked against those of transformers (Baichuan: against its formulas in numpy, as
transformers has no such model).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import sqrt
from typing import Any, Literal

from buildlib.checkpoint.rotary import FULL, KINDS, SLIDING, unsupported

Keys = Mapping[str, Any]
"""`config.json` as parsed; nothing in it is checked yet."""


class SupportedLLMs(StrEnum):
    """A family; the value is its `model_type` in `config.json`.

    `QWEN2` includes Qwen 1.5 and 2.5, which use the same class, `PHI3` the mini models of Phi-3,
    3.5 and 4, and Phi-4 itself, `GLM` the GLM-4 of 2024 and `GLM4` that of 2025, `BAICHUAN`
    Baichuan 2 7B.
    """

    BAICHUAN = "baichuan"
    ERNIE4_5 = "ernie4_5"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"
    GLM = "glm"
    GLM4 = "glm4"
    GRANITE = "granite"
    LLAMA = "llama"
    MISTRAL = "mistral"
    OLMO2 = "olmo2"
    PHI3 = "phi3"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    SEED_OSS = "seed_oss"
    SMOLLM3 = "smollm3"
    STABLELM = "stablelm"


@dataclass(frozen=True)
class LayerNorms:
    """Tensors of the norms of a layer, by where they stand; None: none stands there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


QkNorm = Literal["head", "all_heads", "each_head"]
"""Norm of queries and keys before their rotation: over a head with one gain for all of them, over
all heads together, or over a head with a gain of its own for each."""


@dataclass(frozen=True)
class Family:
    """The differences of a family from Llama.

    Attributes:
        classes: names in `architectures`.
        spelled: our key for a key of the family.
        derived: keys that follow from others, after `spelled`; `transformers` among them is 4 or 5.
        refused: the reason why a sound configuration cannot be built, or None.
        partial_rotary: whether rotary positions may turn a share of each head.
        scalings: kinds of rotary scaling that it takes.
        norm: kind of all norms but those of queries and keys.
        gain_offset: added to the stored gains of all norms.
        layer_norms: where they stand.
        qk_norm: norm of queries and keys, if the configuration has no key for it.
        qk_norm_tensors: names of that norm of queries, and of keys.
        fused: projections that are stored as one, row after row, by the name of that one.
        interleaved: whether rotary positions turn neighbours, not halves.
        normalized_head: whether rows of the output projection are divided by their lengths.
    """

    classes: tuple[str, ...]
    spelled: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Keys], Any]] = field(default_factory=dict)
    refused: Callable[[Keys], str | None] = lambda _: None
    partial_rotary: bool = False
    scalings: tuple[str, ...] = KINDS
    norm: Literal["rms", "layer"] = "rms"
    gain_offset: float = 0.0
    layer_norms: LayerNorms = LayerNorms()
    qk_norm: QkNorm | None = None
    qk_norm_tensors: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved: bool = False
    normalized_head: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_SANDWICH = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _of(name: str, function: Callable[[float], float]) -> Callable[[Keys], object]:
    """Return a key that is a function of a number; other values stay, to be refused."""

    def derived(keys: Keys) -> object:
        value = keys.get(name)
        if type(value) in {int, float} and value is not None and 1e-9 < value < 1e9:
            return function(value)
        return value

    return derived


def _gemma_activation(keys: Keys) -> object:
    """Return Gemma's activation: transformers 5 approximates the `gelu` of the first files."""
    name = keys.get("hidden_act")
    return "gelu_pytorch_tanh" if name == "gelu" and keys["transformers"] == 5 else name


def _attention_output_bias(keys: Keys) -> object:
    """Return that one key decides over the biases of all projections of attention."""
    return keys.get("attention_bias", False)


def _layers(keys: Keys) -> range:
    count = keys.get("num_hidden_layers")
    return range(count if isinstance(count, int) and 0 < count <= 1024 else 0)


def _kinds(keys: Keys, has_window: Callable[[int], object]) -> object:
    """Return the kind of attention of each layer: as the file lists them, or by a rule."""
    kinds = keys.get("layer_types")
    if kinds is not None:
        return kinds
    return [SLIDING if has_window(layer) else FULL for layer in _layers(keys)]


def _alternating(step: int | None) -> Callable[[Keys], object]:
    """Return the rule that every step-th layer sees all; None: as `sliding_window_pattern` says."""

    def kinds(keys: Keys) -> object:
        every = step or keys.get("sliding_window_pattern")
        if type(every) is not int or every < 1:
            if keys.get("layer_types") is None:
                raise unsupported("sliding_window_pattern that is no count of layers")
            every = 1
        return _kinds(keys, lambda layer: (layer + 1) % every)

    return kinds


def _used_window(keys: Keys) -> object:
    return keys.get("sliding_window") if keys.get("use_sliding_window") else None


def _windows_above(keys: Keys) -> object:
    """Return the kind of attention of each layer: a window from `max_window_layers` on."""
    first = keys.get("max_window_layers")
    if type(first) is not int:
        raise unsupported("max_window_layers that is no count of layers")
    return _kinds(keys, lambda layer: _used_window(keys) is not None and layer >= first)


def _rope_layers(keys: Keys) -> object:
    """Return 1 for each layer with rotary positions and 0 for each without."""
    layers, interval = keys.get("no_rope_layers"), keys.get("no_rope_layer_interval")
    if layers is not None:
        return layers
    if type(interval) is not int or interval == 0:
        raise unsupported("no_rope_layer_interval that is no count of layers")
    return [int((layer + 1) % interval != 0) for layer in _layers(keys)]


def _windows_without_rope(keys: Keys) -> object:
    """Return the kind of attention of each layer: a window where no rotary positions are."""
    rope = _rope_layers(keys)
    if not isinstance(rope, list) or len(rope) < len(_layers(keys)):
        raise unsupported("no_rope_layers without an entry for each layer")
    return _kinds(keys, lambda layer: _used_window(keys) is not None and not rope[layer])


_GEMMA: dict[str, Callable[[Keys], Any]] = {
    "embedding_multiplier": _of("hidden_size", sqrt),
    "attention_out_bias": _attention_output_bias,
}
_QUERY_SCALE: dict[str, Callable[[Keys], Any]] = {
    "hidden_act": lambda keys: keys.get("hidden_activation"),
    "attention_multiplier": _of("query_pre_attn_scalar", lambda scalar: scalar**-0.5),
}
_QWEN: dict[str, Callable[[Keys], Any]] = {
    "layer_types": _windows_above,
    "sliding_window": _used_window,
}


def _ministral(keys: Keys) -> str | None:
    """Refuse a Mistral that transformers takes for another model, where the two differ."""
    kinds = keys.get("layer_types")
    if kinds is None or keys.get("sliding_window", 4096) is None:
        return None
    if isinstance(kinds, list) and kinds and set(kinds) == {SLIDING}:
        return None
    return (
        "layer_types of a mistral: MistralForCausalLM ignores them, and AutoModel makes a "
        "ministral, which does not; remove them, or say ministral"
    )


def _stablelm_heads(keys: Keys) -> str | None:
    """Refuse a head size that only the rotary positions of transformers would follow."""
    hidden, heads, dim = (
        keys.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if dim is None or not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None
    if dim == hidden // heads:
        return None
    return "head_dim of a stablelm that is not hidden_size / num_attention_heads"


def _alibi(keys: Keys) -> str | None:
    """Refuse the 13B models, which alone leave out the number of positions."""
    if keys.get("max_position_embeddings") is None or keys.get("num_hidden_layers") == 40:
        return "Baichuan 13B has ALiBi positions, and only Baichuan's 7B has rotary ones"
    return None


FAMILIES: Mapping[SupportedLLMs, Family] = {
    SupportedLLMs.BAICHUAN: Family(
        ("BaichuanForCausalLM",),
        refused=_alibi,
        fused={"self_attn.W_pack": _QKV},
        normalized_head=True,
    ),
    SupportedLLMs.ERNIE4_5: Family(
        ("Ernie4_5ForCausalLM",),
        derived=dict.fromkeys(
            ("attention_bias", "attention_out_bias", "mlp_bias"),
            lambda keys: keys.get("use_bias", False),
        ),
        interleaved=True,
    ),
    SupportedLLMs.GEMMA: Family(
        ("GemmaForCausalLM",),
        derived=_GEMMA | {"hidden_act": _gemma_activation},
        gain_offset=1.0,
    ),
    SupportedLLMs.GEMMA2: Family(
        ("Gemma2ForCausalLM",),
        derived=_GEMMA | _QUERY_SCALE | {"layer_types": _alternating(2)},
        gain_offset=1.0,
        layer_norms=_SANDWICH,
    ),
    SupportedLLMs.GEMMA3: Family(
        ("Gemma3ForCausalLM",),
        derived=_GEMMA | _QUERY_SCALE | {"layer_types": _alternating(None)},
        gain_offset=1.0,
        layer_norms=_SANDWICH,
        qk_norm="head",
    ),
    SupportedLLMs.GLM: Family(
        ("GlmForCausalLM",), partial_rotary=True, fused=_GATE_UP, interleaved=True
    ),
    SupportedLLMs.GLM4: Family(
        ("Glm4ForCausalLM",),
        partial_rotary=True,
        layer_norms=LayerNorms(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        fused=_GATE_UP,
        interleaved=True,
    ),
    SupportedLLMs.GRANITE: Family(
        ("GraniteForCausalLM",),
        derived={
            "attention_out_bias": _attention_output_bias,
            "logits_multiplier": _of("logits_scaling", lambda scaling: 1.0 / scaling),
        },
    ),
    SupportedLLMs.LLAMA: Family(
        ("LlamaForCausalLM",),
        derived={"attention_out_bias": _attention_output_bias},
    ),
    SupportedLLMs.MISTRAL: Family(("MistralForCausalLM",), refused=_ministral),
    SupportedLLMs.OLMO2: Family(
        ("Olmo2ForCausalLM",),
        derived={"attention_out_bias": _attention_output_bias},
        layer_norms=LayerNorms(
            None, "post_attention_layernorm", None, "post_feedforward_layernorm"
        ),
        qk_norm="all_heads",
    ),
    SupportedLLMs.PHI3: Family(
        ("Phi3ForCausalLM",),
        partial_rotary=True,
        scalings=("longrope",),
        fused={"self_attn.qkv_proj": _QKV, **_GATE_UP},
    ),
    SupportedLLMs.QWEN2: Family(
        ("Qwen2ForCausalLM",), derived=_QWEN | {"attention_bias": lambda _: True}
    ),
    SupportedLLMs.QWEN3: Family(
        ("Qwen3ForCausalLM",),
        derived=_QWEN | {"attention_out_bias": _attention_output_bias},
        qk_norm="head",
    ),
    SupportedLLMs.SEED_OSS: Family(("SeedOssForCausalLM",)),
    SupportedLLMs.SMOLLM3: Family(
        ("SmolLM3ForCausalLM",),
        derived={
            "attention_out_bias": _attention_output_bias,
            "layer_types": _windows_without_rope,
            "no_rope_layers": _rope_layers,
        },
    ),
    SupportedLLMs.STABLELM: Family(
        ("StableLmForCausalLM",),
        spelled={"use_qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
        derived={"qk_norm": lambda keys: "each_head" if keys.get("qk_layernorm") else None},
        refused=_stablelm_heads,
        partial_rotary=True,
        norm="layer",
        qk_norm_tensors=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    ),
}  # fmt: skip


def family_of(architecture: SupportedLLMs | None) -> Family:
    """Return the entry of a family; of an unknown one that of Llama, but for its first token."""
    return FAMILIES[architecture] if architecture is not None else _UNKNOWN


_UNKNOWN = Family((), derived={"attention_out_bias": _attention_output_bias}, partial_rotary=True)


def detect_architecture(config: Keys) -> SupportedLLMs | None:
    """Return the family that `model_type` and `architectures` agree on; either may be missing.

    None when they name no known family, or different ones: relatives such as `qwen2_moe` and
    `llama4` have other graphs.
    """
    kind = config.get("model_type")
    by_type = next((family for family in SupportedLLMs if family.value == kind), None)
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names:
        return by_type
    kinds = {name: kind for kind, family in FAMILIES.items() for name in family.classes}
    by_class = {kinds.get(name) if isinstance(name, str) else None for name in names}
    if len(by_class) != 1:
        return None
    (family,) = by_class
    return family if kind is None or family == by_type else None
