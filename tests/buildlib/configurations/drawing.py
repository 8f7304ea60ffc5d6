"""Unusual configurations of every family: keys that are absent, null, default, unusual or foreign.

All draw small models. Nothing here knows what a family does with a key; what transformers refuses
is drawn too.
"""

from typing import Any

from hypothesis import strategies as st

from buildlib.checkpoint.family_keys import read_tables

FAMILIES = tuple(read_tables()[5])
N_TOKENS, CONTEXT, VOCABULARY = 24, 32, 64

_FLAG = [True, False]
_LAYERS = ("full_attention", "sliding_attention")
_ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "swish", "gelu_fast", "relu"]
_EPS = [1e-6, 1e-5, 1e-3, 1e-2]

KEYS: dict[str, list[Any]] = {
    "rms_norm_eps": _EPS,
    "layer_norm_eps": _EPS,
    "norm_eps": _EPS,
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "attention_bias": _FLAG,
    "attention_out_bias": _FLAG,
    "mlp_bias": _FLAG,
    "use_qkv_bias": _FLAG,
    "qkv_bias": _FLAG,
    "qk_layernorm": _FLAG,
    "use_qk_norm": _FLAG,
    "use_parallel_residual": _FLAG,
    "tie_word_embeddings": _FLAG,
    "sliding_window": [4, 8, 10, 100, 4096],
    "use_sliding_window": _FLAG,
    "max_window_layers": [0, 1, 2, 28],
    "sliding_window_pattern": [2, 3, 6],
    "no_rope_layer_interval": [2, 3, 4],
    "attn_logit_softcapping": [2.0, 5.0, 50.0],
    "final_logit_softcapping": [2.0, 5.0, 30.0],
    "query_pre_attn_scalar": [10, 64, 256],
    "embedding_multiplier": [1.0, 3.0, 12],
    "residual_multiplier": [1.0, 0.4],
    "attention_multiplier": [1.0, 0.2],
    "logits_scaling": [1.0, 4.0, 8],
    "rope_theta": [500.0, 10000.0, 1000000, 2e6],
    "rope_local_base_freq": [100.0, 10000.0],
    "partial_rotary_factor": [0.25, 0.5, 0.75, 1.0],
    "original_max_position_embeddings": [8, 64],
    "max_position_embeddings": [32, 64, 4096],
    "initializer_range": [0.1],
    "attention_dropout": [0.0, 0.5],
    "use_cache": _FLAG,
    "pretraining_tp": [1, 2],
    "num_experts": [8],
    "clip_qkv": [8.0],
    "scale_emb": [12.0],
    "use_bidirectional_attention": [False],
    "torch_dtype": ["bfloat16", "float32"],
}
"""Keys of all families, and values for small models."""


def _one_in(draw: st.DrawFn, n: int) -> bool:
    return draw(st.integers(1, n)) == n


@st.composite
def scalings(draw: st.DrawFn, rotary_dim: int) -> dict[str, Any]:
    """Draw a `rope_scaling`, complete or not."""
    kinds = ["linear", "dynamic", "yarn", "llama3", "longrope", "default", "su"]
    kind = draw(st.sampled_from(kinds))
    names = draw(st.sampled_from([["rope_type"], ["type"], ["rope_type", "type"]]))
    made: dict[str, Any] = dict.fromkeys(names, kind)
    needed: dict[str, list[Any]] = {}
    optional: dict[str, list[Any]] = {}
    if kind in {"linear", "dynamic", "yarn", "llama3"}:
        needed["factor"] = [2.0, 4.0, 8, 1.0]
    if kind == "llama3":
        needed |= {"low_freq_factor": [1.0, 2.0], "high_freq_factor": [4.0, 8.0, 1.0]}
        needed["original_max_position_embeddings"] = [8, 64]
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": [8, 64, 256],
            "beta_fast": [4.0, 32.0, 8],
            "beta_slow": [1.0, 2.0, None],
            "attention_factor": [1.3, None],
            "mscale": [1.0, 0.7],
            "mscale_all_dim": [1.0, 0.5],
            "truncate": [False, True],
        }
    if kind in {"longrope", "su"}:
        count = max(1, rotary_dim // 2)
        for key, top in (("short_factor", 1.5), ("long_factor", 6.0)):
            made[key] = [round(1.0 + (top - 1.0) * i / count, 3) for i in range(count)]
        optional["original_max_position_embeddings"] = [8, 64]
        optional |= {"factor": [2.0, 4.0], "attention_factor": [1.2]}
    for key, values in needed.items():
        if not _one_in(draw, 20):
            made[key] = draw(st.sampled_from(values))
    for key, values in optional.items():
        if _one_in(draw, 3):
            made[key] = draw(st.sampled_from(values))
    if _one_in(draw, 6):
        made["rope_theta"] = draw(st.sampled_from([300.0, 5e5]))
    return made


@st.composite
def configurations(
    draw: st.DrawFn, family: str, versions: tuple[str | None, ...]
) -> dict[str, Any]:
    """Draw the `config.json` of a small model, of one of the `versions` of transformers."""
    layers = draw(st.sampled_from([2, 3, 4]))
    kv, group = draw(st.sampled_from([(1, 7), (1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (2, 3)]))
    heads, explicit = kv * group, draw(st.booleans())
    dim = draw(st.sampled_from([8, 12, 16, 40, 80, 96, 256] if explicit else [8, 16, 40, 80, 96]))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 8 * heads if explicit else dim * heads,
        "intermediate_size": draw(st.sampled_from([40, 56])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": VOCABULARY,
        "pad_token_id": draw(st.sampled_from([0, None])),
        "eos_token_id": draw(st.sampled_from([2, [2, 5], 63])),
        "max_position_embeddings": 64,
    }
    if _one_in(draw, 2):
        config["bos_token_id"] = draw(st.sampled_from([1, 63]))
    if explicit or _one_in(draw, 3):
        config["head_dim"] = dim
    elif _one_in(draw, 4) or family in {"gemma", "gemma2", "gemma3_text"}:
        config["head_dim"] = draw(st.sampled_from([None, dim]))
    if kv == heads and _one_in(draw, 2):
        config["num_key_value_heads"] = None
    version = draw(st.sampled_from(versions))
    if version is not None:
        config["transformers_version"] = version
    for key in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=8, unique=True)):
        config[key] = draw(st.sampled_from(KEYS[key]))
    if _one_in(draw, 4):
        config[draw(st.sampled_from(sorted(KEYS)))] = None
    if _one_in(draw, 3):
        kinds = draw(st.lists(st.sampled_from(_LAYERS), min_size=layers, max_size=layers))
        config["layer_types"] = draw(st.sampled_from([kinds, ["full_attention"] * layers, None]))
    if _one_in(draw, 6):
        flags = st.lists(st.sampled_from([0, 1]), min_size=layers, max_size=layers)
        config["no_rope_layers"] = draw(flags)
    rotary_dim = int(dim * (config.get("partial_rotary_factor") or 1.0))
    if _one_in(draw, 3):
        config["rope_scaling"] = draw(st.none() | scalings(rotary_dim))
    if _one_in(draw, 4):
        flat = scalings(rotary_dim)
        plain = {"rope_theta": st.just(700.0), "partial_rotary_factor": st.just(0.5)}
        nested = st.fixed_dictionaries({}, optional=dict.fromkeys(_LAYERS, flat))
        choice = st.none() | flat | st.fixed_dictionaries({}, optional=plain) | nested
        config["rope_parameters"] = draw(choice)
    # Granite's default of 1.0 sets scores so far apart that a mask of -100 no longer hides a slot.
    wide = family == "granite" and config.get("head_dim") == 256
    return ({"attention_multiplier": 0.1} if wide else {}) | config
