"""The keys of `config.json` that each family of transformers reads, with their defaults.

    PYTHON -m tools.family_defaults

writes its release into `buildlib/checkpoint/family_keys.json` in an environment with torch and
transformers; no other package is needed. Defaults are those of the configuration classes. That a
key is read is found by trying it: a small model is made with and without it, and the key is read if
parameters or logits change, or if transformers refuses the unusual value. So a key that a class has
but no formula uses, such as Gemma 3's `attn_logit_softcapping`, is not read.
"""

import copy
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.buildlib.configurations.reference import make_model

TABLES = Path(__file__).parents[1] / "buildlib" / "checkpoint" / "family_keys.json"

FAMILIES = (
    "ernie4_5",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "stablelm",
)

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_LISTS = {"short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 2.1, 2.2, 2.3]}
_WHOLE = {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 2}
"""So that frequencies and scalings count: whole heads turn, in layers that see all."""
_BASES: tuple[dict[str, Any], ...] = (
    {},
    _WINDOWS,
    _WINDOWS | {"no_rope_layers": [0, 1]},
    _WINDOWS | {"layer_types": ["full_attention"] * 2},
    _WINDOWS | {"layer_types": ["sliding_attention"] * 2, "no_rope_layers": [0, 1]},
    {"partial_rotary_factor": 1.0},
    _WHOLE | {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
    _WHOLE | {"rope_scaling": {"type": "longrope", **_LISTS}},
)
_UNUSUAL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 80,
    "head_dim": 12,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 0.5,
    "layer_norm_eps": 0.5,
    "sliding_window": 4,
    "use_sliding_window": False,
    "max_window_layers": 0,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window_pattern": 2,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 1,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "query_pre_attn_scalar": 3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
    "rope_theta": 50.0,
    "rope_local_base_freq": 50.0,
    "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 16,
    "initializer_range": 0.1,
    "pad_token_id": 1,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pretraining_tp": 2,
    "use_bidirectional_attention": True,
}
_UNDECLARED = (
    "head_dim",
    "layer_types",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "use_bidirectional_attention",
)
"""Keys that code asks for without a default in the class, by `getattr` or `kwargs`."""
_NESTED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "default", "rope_theta": 60.0},
}
_TOKENS = list(range(3, 27))


def _effect(family: str, keys: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return what a configuration gives: shapes and logits, or None where transformers refuses."""
    import torch
    import transformers

    try:
        kind = transformers.AutoConfig.for_model(family).__class__
        config = kind(**copy.deepcopy(keys))
        model = make_model(config)
        with torch.no_grad():
            logits = model(torch.tensor([_TOKENS]), use_cache=False).logits.numpy()
    except Exception:  # noqa: BLE001  (whatever transformers or torch raise)
        return None
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return (shapes, logits) if np.isfinite(logits).all() else None


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401
    if one is None or other is None:
        return one is other
    return bool(one[0] == other[0] and np.allclose(one[1], other[1], rtol=0, atol=1e-6))


def class_keys(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the keys of a configuration class and their defaults."""
    given = inspect.signature(type(config).__init__).parameters.values()
    if hasattr(type(config), "__dataclass_fields__"):
        from dataclasses import MISSING, fields

        common = {field.name for field in fields(type(config).__mro__[1])}
        return {
            field.name: None if field.default is MISSING else field.default
            for field in fields(config)
            if field.name not in common
        }
    return {p.name: p.default for p in given if p.name not in {"self", "kwargs"}}


def _absent(config: Any, key: str) -> Any:  # noqa: ANN401
    """Return what a key that no class declares is when it is absent."""
    if key in {"rope_scaling", "rope_parameters"}:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if key == "rope_local_base_freq" and "sliding_attention" in rope:
        return rope["sliding_attention"]["rope_theta"]
    rope = rope.get("full_attention", rope)
    return rope.get(key, getattr(config, key, getattr(config, f"_{key}", None)))


def describe(family: str) -> dict[str, Any]:
    """Return the keys that a family reads, which of them may be null, and which it ignores."""
    import transformers

    config = transformers.AutoConfig.for_model(family)
    declared = class_keys(config)
    read: dict[str, Any] = {}
    nullable: list[str] = []
    bases = [_SIZES | changes for changes in _BASES]
    for base in bases:
        if family not in {"stablelm", "phi3"}:  # whose heads are hidden_size / num_attention_heads
            base["head_dim"] = 8  # the default of some is 128 or 256
        if "layer_types" not in declared:
            base.pop("layer_types", None)
    plain = [_effect(family, base) for base in bases]
    tried = {*declared, *_UNDECLARED}
    for key in sorted(tried):
        default = declared[key] if key in declared else _absent(config, key)
        value = _UNUSUAL.get(key, _other(default))
        if key == "rope_parameters" and family == "gemma3_text":
            value = _NESTED
        pairs = [(base, was) for base, was in zip(bases, plain, strict=True) if was is not None]
        if all(_same(_effect(family, base | {key: value}), was) for base, was in pairs):
            continue
        read[key] = default
        if any(_effect(family, base | {key: None}) is not None for base, _ in pairs):
            nullable.append(key)
    ids = {key: declared.get(key) for key in ("bos_token_id", "eos_token_id")}
    if ids["eos_token_id"] is None:
        ids["eos_token_id"] = getattr(config, "eos_token_id", None)
    model = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
    return {
        "class": model.__name__,
        "keys": dict(sorted((read | ids).items())),
        "nullable": sorted({*nullable, *ids}),
        "ignored": {
            key: declared[key] for key in sorted(declared.keys() - read.keys() - ids.keys())
        },
    }


def _other(value: object) -> object:
    return not value if isinstance(value, bool) else 0.5 if isinstance(value, float) else value


def main() -> None:
    """Write the keys of all families."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    described = {family: describe(family) for family in sys.argv[1:] or FAMILIES}
    write(transformers.__version__, described)


def write(version: str, described: dict[str, Any]) -> None:
    """Put the families of one release in the place of those of its major version."""
    major = version.partition(".")[0]
    releases = json.loads(TABLES.read_bytes())
    kept = {name: table for name, table in releases.items() if name.partition(".")[0] != major}
    TABLES.write_text(_text(dict(sorted((kept | {version: described}).items()))) + "\n")


def _text(value: Any, depth: int = 0) -> str:  # noqa: ANN401
    """Return JSON whose releases, families and their keys have a line each."""
    if depth == 3:
        return json.dumps(value)
    indent = " " * depth
    rows = (f"{indent} {json.dumps(key)}: {_text(each, depth + 1)}" for key, each in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


if __name__ == "__main__":
    main()
