"""Families of models that build from a checkpoint: one entry each, by the keys of `config.json`.

A family is Llama with differences, and an entry states only those: which keys it spells otherwise,
what a file leaves out, and in what its layers differ. `DecoderConfig` reads the keys through it and
`buildlib.graph.decoder` writes every difference; neither knows a family by name.

A model of no such family may build all the same from ONNX: what counts is its graph, which
importing reads. A family stands here once its logits are checked against those of transformers
(Baichuan: against its formulas in numpy, as transformers has no such model).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import sqrt
from typing import Any, Literal

Keys = Mapping[str, Any]
"""`config.json` as parsed; nothing in it is checked yet."""


class SupportedLLMs(StrEnum):
    """A family; the value is its `model_type` in `config.json`.

    `QWEN2` includes Qwen 1.5 and 2.5, which use the same class, `PHI3` the mini models of Phi-3,
    3.5 and 4, and Phi-4 itself, `GLM` the GLM-4 of 2024 and `GLM4` that of 2025, `BAICHUAN`
    Baichuan 2 7B.
    """

    BAICHUAN = "baichuan"
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
    """In what a family differs from Llama.

    Attributes:
        classes: names in `architectures`.
        defaults: of keys that a file may leave out.
        spelled: our key for a key of the family.
        derived: keys that follow from others, after `defaults` and `spelled`.
        refused: says why a sound configuration cannot be built, or None.
        needs_bos: whether a text begins with a token that the file must name.
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
    defaults: Keys = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Keys], Any]] = field(default_factory=dict)
    refused: Callable[[Keys], str | None] = lambda _: None
    needs_bos: bool = False
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
    """Return a key that is a function of a number; of anything else it is that, to be refused."""

    def derived(keys: Keys) -> object:
        value = keys.get(name)
        if type(value) in {int, float} and value is not None and 1e-9 < value < 1e9:
            return function(value)
        return value

    return derived


def _gemma_activation(keys: Keys) -> object:
    """Return Gemma's activation; the first files say `gelu` and mean its approximation."""
    given = keys.get("hidden_activation") or keys.get("hidden_act")
    return "gelu_pytorch_tanh" if given is None or given == "gelu" else given


def _attention_output_bias(keys: Keys) -> object:
    """Return that one key decides over the biases of all projections of attention."""
    return keys.get("attention_bias", False)


_GEMMA: dict[str, Callable[[Keys], Any]] = {
    "hidden_act": _gemma_activation,
    "embedding_multiplier": _of("hidden_size", sqrt),
    "attention_out_bias": _attention_output_bias,
}
_QUERY_SCALE: dict[str, Callable[[Keys], Any]] = {
    "attention_multiplier": _of("query_pre_attn_scalar", lambda scalar: scalar**-0.5),
}


def _alternating(keys: Keys) -> object:
    """Return the kind of attention of each layer; every `sliding_window_pattern`th sees all."""
    given, step = keys.get("layer_types"), keys.get("sliding_window_pattern")
    layers = keys.get("num_hidden_layers")
    if given is not None or not isinstance(layers, int) or not 0 < layers <= 1024:
        return given
    if not isinstance(step, int) or step < 1:
        return given
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(layer + 1) % step != 0] for layer in range(layers)]


_QWEN: Keys = {"use_sliding_window": False, "max_window_layers": 28}


def _windows_above(keys: Keys) -> object:
    """Return the kind of attention of each layer: a window from `max_window_layers` on."""
    given, first = keys.get("layer_types"), keys.get("max_window_layers")
    layers = keys.get("num_hidden_layers")
    if given is not None or keys.get("use_sliding_window") is not True:
        return given
    if not isinstance(layers, int) or not 0 < layers <= 1024 or not isinstance(first, int):
        return given
    kinds = ("full_attention", "sliding_attention")
    return [kinds[layer >= first] for layer in range(layers)]


def _rope_layers(keys: Keys) -> object:
    """Return 1 for each layer with rotary positions and 0 for each without."""
    given = keys.get("no_rope_layers")
    layers, interval = keys.get("num_hidden_layers"), keys.get("no_rope_layer_interval")
    if given is not None or not isinstance(layers, int) or not 0 < layers <= 1024:
        return given
    step = interval if isinstance(interval, int) and interval > 0 else layers + 1
    return [int((layer + 1) % step != 0) for layer in range(layers)]


def _alibi(keys: Keys) -> str | None:
    """Refuse the 13B models, which alone leave out the number of positions."""
    if keys.get("max_position_embeddings") is None or keys.get("num_hidden_layers") == 40:
        return "Baichuan 13B has ALiBi positions, and only Baichuan's 7B has rotary ones"
    return None


FAMILIES: Mapping[SupportedLLMs, Family] = {
    SupportedLLMs.BAICHUAN: Family(
        ("BaichuanForCausalLM",),
        refused=_alibi,
        needs_bos=True,
        fused={"self_attn.W_pack": _QKV},
        normalized_head=True,
    ),
    SupportedLLMs.GEMMA: Family(
        ("GemmaForCausalLM",),
        defaults={"head_dim": 256, "tie_word_embeddings": True},
        derived=_GEMMA,
        needs_bos=True,
        gain_offset=1.0,
    ),
    SupportedLLMs.GEMMA2: Family(
        ("Gemma2ForCausalLM",),
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        derived=_GEMMA | _QUERY_SCALE | {"layer_types": _alternating},
        needs_bos=True,
        gain_offset=1.0,
        layer_norms=_SANDWICH,
    ),
    SupportedLLMs.GEMMA3: Family(
        ("Gemma3ForCausalLM",),
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        derived=_GEMMA | _QUERY_SCALE | {"layer_types": _alternating},
        needs_bos=True,
        gain_offset=1.0,
        layer_norms=_SANDWICH,
        qk_norm="head",
    ),
    SupportedLLMs.GLM: Family(
        ("GlmForCausalLM",),
        defaults={"partial_rotary_factor": 0.5, "attention_bias": True},
        fused=_GATE_UP,
        interleaved=True,
    ),
    SupportedLLMs.GLM4: Family(
        ("Glm4ForCausalLM",),
        defaults={"partial_rotary_factor": 0.5, "attention_bias": True},
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
        defaults={"attention_multiplier": 1.0, "logits_scaling": 1.0},
        derived={
            "attention_out_bias": _attention_output_bias,
            "logits_multiplier": _of("logits_scaling", lambda scaling: 1.0 / scaling),
        },
    ),
    SupportedLLMs.LLAMA: Family(
        ("LlamaForCausalLM",),
        derived={"attention_out_bias": _attention_output_bias},
        needs_bos=True,
    ),
    SupportedLLMs.MISTRAL: Family(
        ("MistralForCausalLM",), derived={"attention_bias": lambda _: False}, needs_bos=True
    ),
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
        derived={"attention_bias": lambda _: False},
        needs_bos=True,
        fused={"self_attn.qkv_proj": _QKV, **_GATE_UP},
    ),
    SupportedLLMs.QWEN2: Family(
        ("Qwen2ForCausalLM",),
        defaults=_QWEN,
        derived={"attention_bias": lambda _: True, "layer_types": _windows_above},
    ),
    SupportedLLMs.QWEN3: Family(
        ("Qwen3ForCausalLM",),
        defaults=_QWEN,
        derived={"attention_out_bias": _attention_output_bias, "layer_types": _windows_above},
        qk_norm="head",
    ),
    SupportedLLMs.SEED_OSS: Family(("SeedOssForCausalLM",), defaults={"attention_bias": True}),
    SupportedLLMs.SMOLLM3: Family(
        ("SmolLM3ForCausalLM",),
        defaults={
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
        },
        derived={
            "attention_out_bias": _attention_output_bias,
            "no_rope_layers": _rope_layers,
        },
    ),
    SupportedLLMs.STABLELM: Family(
        ("StableLmForCausalLM",),
        defaults={"partial_rotary_factor": 0.25},
        spelled={"use_qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
        derived={"qk_norm": lambda keys: "each_head" if keys.get("qk_layernorm") else None},
        norm="layer",
        qk_norm_tensors=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    ),
}  # fmt: skip


def family_of(architecture: SupportedLLMs | None) -> Family:
    """Return the entry of a family; of an unknown one that of Llama, but for its first token."""
    return FAMILIES[architecture] if architecture is not None else _UNKNOWN


_UNKNOWN = Family((), derived={"attention_out_bias": _attention_output_bias})


def detect_architecture(config: Keys) -> SupportedLLMs | None:
    """Return the family that `model_type` and `architectures` agree on; either may be missing.

    None when they name no known family, or different ones: relatives such as `qwen2_moe` and
    `llama4` have other graphs and are not taken for what they resemble.
    """
    kind = config.get("model_type")
    by_type = next((family for family in SupportedLLMs if family.value == kind), None)
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names:
        return by_type
    known = {name: kind for kind, family in FAMILIES.items() for name in family.classes}
    by_class = {known.get(name) if isinstance(name, str) else None for name in names}
    if len(by_class) != 1:
        return None
    (family,) = by_class
    return family if kind is None or family == by_type else None
