"""Valid Genie configurations, one for each thing that is documented, and their mutations."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]
Path = tuple[str | int, ...]

DIALOG: Values = {
    "dialog": {
        "version": 1,
        "type": "basic",
        "max-num-tokens": 200,
        "stop-sequence": ["\n\n"],
        "context": {"version": 1, "size": 1024, "n-vocab": 32000, "bos-token": 1, "eos-token": 2},
        "sampler": {"version": 1, "seed": 42, "temp": 0.8, "top-k": 40, "top-p": 0.95},
        "tokenizer": {"version": 1, "path": "tokenizer.json"},
        "engine": {
            "version": 1,
            "n-threads": 3,
            "backend": {
                "version": 1,
                "type": "QnnHtp",
                "QnnHtp": {
                    "version": 1,
                    "use-mmap": True,
                    "spill-fill-bufsize": 0,
                    "mmap-budget": 0,
                    "poll": True,
                    "cpu-mask": "0xe0",
                    "kv-dim": 128,
                    "allow-async-init": False,
                },
                "extensions": "htp_backend_ext_config.json",
            },
            "model": {
                "version": 1,
                "type": "binary",
                "binary": {"version": 1, "ctx-bins": ["part_1_of_2.bin", "part_2_of_2.bin"]},
                "positional-encoding": {"type": "rope", "rope-dim": 64, "rope-theta": 10000},
            },
        },
    }
}
ENCODER: Values = {
    "embedding": {
        "version": 1,
        "context": {
            "version": 1, "n-vocab": 30522, "ctx-size": 512, "embed-size": 1024, "pad-token": 0,
        },
        "prompt": {"version": 1, "prompt-template": ["[CLS]", "[SEP]"]},
        "tokenizer": {"version": 1, "path": "tokenizer.json"},
        "truncate-input": True,
        "engine": {
            "version": 1,
            "n-threads": 2,
            "backend": {
                "version": 1,
                "type": "QnnHtp",
                "QnnHtp": {
                    "version": 1,
                    "spill-fill-bufsize": 0,
                    "use-mmap": True,
                    "pooled-output": True,
                    "allow-async-init": False,
                    "disable-kv-cache": True,
                },
                "extensions": "htp_backend_ext_config.json",
            },
            "model": {
                "version": 1, "type": "binary", "binary": {"version": 1, "ctx-bins": ["a.bin"]},
            },
        },
    }
}  # fmt: skip
LIBRARY = {"version": 1, "type": "library", "library": {"version": 1, "model-bin": "model.bin"}}
HTP = "dialog/engine/backend/QnnHtp"
POSITIONS = "dialog/engine/model/positional-encoding"
LORA = "dialog/engine/model/binary/lora"
TYPE, SAMPLER, CONTEXT = "dialog/type", "dialog/sampler", "dialog/context"
Changes = dict[str, object]
"""Values at paths of a configuration; `...` removes one."""


@dataclass(frozen=True)
class Configuration:
    """A valid configuration.

    Attributes:
        name: in words, as the table in the documents has it.
        base: of which it is a variation; only what differs is mutated again.
    """

    name: str
    values: Values
    base: Values | None = None


def changed(values: Values, **changes: object) -> Values:
    """A copy with other values at paths; `...` removes one."""
    found = copy.deepcopy(values)
    for path, value in changes.items():
        *steps, last = path.split("/")
        place: Any = found
        for step in steps:
            place = place.setdefault(step, {}) if isinstance(place, dict) else place[int(step)]
        if value is ...:
            del place[last]
        else:
            place[int(last) if isinstance(place, list) else last] = copy.deepcopy(value)
    return found


def _two_engines(first: str, second: str) -> Changes:
    engines = [{**copy.deepcopy(DIALOG["dialog"]["engine"]), "role": r} for r in (first, second)]
    return {"dialog/engine": engines}


def _kebab(block: Mapping[str, object]) -> Values:
    return {key.replace("_", "-"): value for key, value in block.items()}


def _scaled(**scaling: object) -> Changes:
    return {f"{POSITIONS}/rope-scaling": _kebab(scaling)}


def _lora(**block: object) -> Changes:
    return {LORA: {"version": 1, "alpha-tensor-name": "alpha", **_kebab(block)}}


def _table(datatype: str) -> Changes:
    table = {"version": 1, "type": "lut", "lut-path": "t", "size": 64, "datatype": datatype}
    grid = {"quant-param": {"scale": 0.25, "offset": -3}} if "fixed" in datatype else {}
    return {"dialog/embedding": table | grid}


def _vectors(**block: object) -> Changes:
    return {"dialog/embedding": {"version": 1, "size": 64, **block}}


def _block(kind: str, **block: object) -> Changes:
    return {TYPE: kind, f"dialog/{kind}": {"version": 1, **_kebab(block)}}


_SSD = _block(
    "ssd-q1", ssd_version=1, forecast_token_count=4, branches=[3, 2], forecast_prefix=16,
    forecast_prefix_name="forecast-prefix",
)  # fmt: skip
_STREAMED = {"dialog/ssd-q1/n-streams": 2, "dialog/ssd-q1/p-threshold": 0.1}
_SPD = _block("spd", draft_len=7)
_EAGLET = _block(
    "eaglet", eaglet_version=2, draft_len=5, n_branches=8, max_tokens_target_can_evaluate=32,
    draft_kv_cache=True,
)  # fmt: skip
_MAPPED = {"dialog/engine/1/model/draft-token-map": "map.json", f"{CONTEXT}/draft-n-vocab": 8000}
_ADAPTER = {"version": 1, "name": "first", "path": "lora/first"}
_SECTIONS = {"version": 1, "name": "first", "bin-sections": ["1.bin", "2.bin"]}
_ALPHAS = _SECTIONS | {"alphas": ["first_alpha"]}
_GROUP = {"version": 1, "name": "g", "members": ["first"], "quant-bin-sections": ["q.bin"]}
_WINDOW = {
    "version": 1, "type": "sliding-window", "reserved-tokens": 4,
    "sliding-window": {"version": 1, "window-size": 64},
}  # fmt: skip
_KEYDIFF = {
    "version": 1, "type": "keydiff", "reserved-tokens": 4,
    "keydiff": {"version": 1, "scoring-network": "scores.bin", "update-frequency": 64},
}  # fmt: skip
_CACHES = {
    "version": 1, "prefix": "past_", "attention-mask-tensor-name": "attention_mask",
    "cache-index-tensor-name": "cache_index", "longcontext": _WINDOW,
}  # fmt: skip
_TRANSFORMER = {
    "version": 1, "type": "QnnGenAiTransformer",
    "QnnGenAiTransformer": {
        "version": 1, "n-logits": 1, "n-layer": 32, "n-embd": 4096, "n-heads": 32,
        "n-kv-heads": 8, "kv-quantization": True, "use-mmap": True,
    },
}  # fmt: skip
_TRANSFORMED: Changes = {
    "dialog/engine/backend": _TRANSFORMER, "dialog/engine/model": LIBRARY,
}  # fmt: skip
_SECONDARY = {
    "version": 1, "role": "secondary", "n-threads": 4, "backend": _TRANSFORMER, "model": LIBRARY,
}  # fmt: skip
_PENALTY = {
    "version": 1, "penalize-last-n": 64, "repetition-penalty": 1.1, "presence-penalty": 0.1,
    "frequency-penalty": -0.1,
}  # fmt: skip
_CUSTOM = {"version": 1, "type": "custom", "callback-name": "choose"}
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.5] * 64}
_SEEN = {"mrope_section": [16, 24, 24], "time_step": 50, "spatial_merge_size": 2}
_SWITCHING: Changes = {f"{HTP}/enable-graph-switching": True}
_INTEGERS = ("ufixed8", "ufixed16", "sfixed8", "sfixed16")

DIALOGS: dict[str, Changes] = {
    "dialog basic": {},
    "dialog ssd-q1": _SSD,
    "dialog ssd-q1 with n-streams": _SSD | _STREAMED,
    "dialog lade": _block("lade", update_mode="FWD_MAX_HIT", window=8, ngram=5, gcap=8),
    "dialog lade without options": {TYPE: "lade"},
    "dialog spd": _two_engines("target", "draft") | _SPD,
    "dialog multistream": _block("multistream", n_streams=8, p_threshold=0.5),
    "dialog eaglet": _two_engines("draft", "target") | _EAGLET,
    "dialog eaglet with draft-token-map": _two_engines("target", "draft") | _EAGLET | _MAPPED,
    "dialog kv-share": {
        **_two_engines("primary", "secondary"), TYPE: "kv-share", "dialog/engine/1": _SECONDARY,
        "dialog/kv-share": {},
    },
    "context with eot, pad, n-embd, several eos": {
        f"{CONTEXT}/eos-token": [2, 3],
        f"{CONTEXT}/eot-token": 4,
        f"{CONTEXT}/pad-token": 0,
        f"{CONTEXT}/n-embd": 4096,
    },
    "context with a grammar": {
        f"{CONTEXT}/grammar": {"type": "regex", "file": "date.txt", "backend": "xgrammar"},
    },
    "sampler with token-penalty": {f"{SAMPLER}/token-penalty": _PENALTY},
    "sampler basic": {SAMPLER: {"version": 1, "type": "basic", "greedy": False}},
    "sampler greedy": {SAMPLER: {"version": 1, "greedy": True, "top-k": 1}},
    "sampler custom": {SAMPLER: _CUSTOM},
    "sampler of Genie's own defaults": {SAMPLER: {"version": 1}},
    **{f"embedding lut {kind}": _table(kind) for kind in ("float32", *_INTEGERS)},
    **{
        f"embedding callback {kind}": _vectors(type="callback", datatype=kind)
        for kind in ("float32", "native", *_INTEGERS)
    },
    "embedding without type": _vectors(),
    "rope-scaling default": _scaled(rope_type="default"),
    "rope-scaling linear": _scaled(rope_type="linear", factor=4.0),
    "rope-scaling llama3": _scaled(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "rope-scaling longrope": _scaled(
        rope_type="longrope", factor=1.0, original_max_position_embeddings=4096, **_FACTORS
    ),
    **{
        f"rope-scaling {name}": _scaled(rope_type=name, **_SEEN)
        for name in ("qwen2vl-mrope", "qwen3vl-mrope")
    },
    "rope-scaling proportional": _scaled(
        rope_type="proportional", factor=1.0, partial_rotary_factor=0.25
    ),
    **{
        f"positional-encoding {kind}": {POSITIONS: {"type": kind}}
        for kind in ("alibi", "absolute", "none")
    },
    "positional-encoding of two kinds": {
        POSITIONS: [
            {"type": "rope", "rope-dim": 64, "rope-theta": 1e6},
            {"type": "rope", "rope-dim": 64, "rope-theta": 1e4, "prefix": "local_"},
        ],
    },
    "positions of QnnHtp": {
        POSITIONS: ..., f"{HTP}/pos-id-dim": 64, f"{HTP}/rope-theta": 10000.0,
    },
    "QnnHtp data-alignment-size": {f"{HTP}/data-alignment-size": 64},
    "QnnHtp spill-fill-bufsize": {f"{HTP}/spill-fill-bufsize": 320000000},
    "QnnHtp direct-io": {f"{HTP}/direct-io": True},
    "QnnHtp shared-engine": {f"{HTP}/shared-engine": True, f"{HTP}/allow-async-init": True},
    "QnnHtp enable-graph-switching": _SWITCHING,
    **{
        f"QnnHtp graph-switching-lora-policy {policy}": {
            **_SWITCHING, f"{HTP}/graph-switching-lora-policy": policy,
        }
        for policy in ("lazy", "eager")
    },
    **{
        f"QnnHtp kv-update-method {method}": {f"{HTP}/kv-update-method": method}
        for method in ("POINTER_SHIFT", "SHIFT_CONCAT", "SMART_MASK", "NATIVE_KV")
    },
    "longcontext sliding-window": {"dialog/engine/longcontext": _WINDOW},
    "longcontext keydiff": {"dialog/engine/longcontext": _KEYDIFF},
    "cache-groups": {"dialog/engine/cache-groups": [_CACHES, {"version": 1, "prefix": "global_"}]},
    "QnnGpu": {
        "dialog/engine/backend": {"version": 1, "type": "QnnGpu", "QnnGpu": {"version": 1}}
    },
    "QnnGenAiTransformer": _TRANSFORMED,
    "LoRA v1": _lora(lora_version=1, adapters=[_ADAPTER]),
    "LoRA bin-sections": _lora(adapters=[_SECTIONS]),
    "LoRA v2 with groups": _lora(lora_version=2, adapters=[_ALPHAS], groups=[_GROUP]),
    "LoRA v3": _lora(lora_version=3, adapters=[_SECTIONS]),
    "QnnHtp skip-lora-validation": {f"{HTP}/skip-lora-validation": True},
    "LoRA QnnGenAiTransformer": {
        **_TRANSFORMED,
        "dialog/engine/model/library/lora": {
            "version": 1, "alpha-tensor-name": "alpha", "adapters": [_SECTIONS],
        },
    },
}  # fmt: skip
_ENCODER_HTP = "embedding/engine/backend/QnnHtp"
_ENCODER_TRANSFORMER = {"version": 1, "n-layer": 24, "n-embd": 1024, "n-heads": 16}
_ENCODERS: dict[str, Changes] = {
    "text-to-embedding QnnHtp": {},
    "text-to-embedding per token": {
        f"{_ENCODER_HTP}/data-alignment-size": 64, f"{_ENCODER_HTP}/pooled-output": False,
    },
    "text-to-embedding direct-io": {f"{_ENCODER_HTP}/direct-io": True},
    "text-to-embedding with rope": {
        "embedding/engine/model/positional-encoding": {"type": "rope", "rope-dim": 64}
    },
    "text-to-embedding QnnGenAiTransformer": {
        "embedding/engine/backend": {
            "version": 1,
            "type": "QnnGenAiTransformer",
            "QnnGenAiTransformer": _ENCODER_TRANSFORMER,
        },
        "embedding/engine/model": LIBRARY,
    },
}  # fmt: skip


IMAGE_ENCODER: Values = {
    "image-encoder": {
        "version": 1,
        "engine": {
            "version": 1,
            "n-threads": 2,
            "mode": "image",
            "backend": {
                "version": 1,
                "type": "QnnHtp",
                "QnnHtp": {
                    "version": 1, "spill-fill-bufsize": 0, "use-mmap": True,
                    "allow-async-init": False,
                },
                "extensions": "htp_backend_ext_config.json",
            },
            "model": {
                "version": 1,
                "type": "binary",
                "binary": {"version": 1, "ctx-bins": ["vision.bin"]},
                "vision-param": {"height": 24, "width": 24},
            },
        },
    }
}  # fmt: skip


def _nodes() -> dict[str, Values]:
    encoder = ENCODER["embedding"]
    table = {"version": 1, "size": 64, "datatype": "float32"}
    return {
        "text-generator": {"text-generator": {**DIALOG["dialog"], "accumulator-size": 64000}},
        "text-encoder": {"text-encoder": {**encoder, "type": "basic"}},
        "text-encoder with a table": {
            "text-encoder": {
                "version": 1, "type": "lut", "tokenizer": encoder["tokenizer"],
                "lut": table | {"lut-path": "t", "quant-param": {"scale": 0.25, "offset": -3}},
            }
        },
        "image-encoder": IMAGE_ENCODER,
    }  # fmt: skip


def _others() -> dict[str, Values]:
    dialog = changed(DIALOG, **_table("ufixed16"))["dialog"]
    engine = {key: dialog[key] for key in ("version", "context", "embedding", "engine")}
    scored = {"convert-to-basic": True, "role": "target"}
    return {
        "standalone engine": {"standalone-engine": engine},
        "standalone sampler": {"sampler": dialog["sampler"]},
        "standalone sampler custom": {"sampler": _CUSTOM},
        "profile": {"profile": {"version": 1}},
        "profile with trace": {
            "profile": {"version": 1, "trace": {"version": 1, "enable": True}}
        },
        "accuracy": {"dataset": "text.txt", "type": "perplexity"},
        "accuracy of a role": {"dataset": "t.txt", "type": "perplexity", "engine": scored},
    }  # fmt: skip


EXTENSIONS = Configuration(
    "HTP backend extensions",
    {
        "devices": [
            {
                "soc_model": 69,
                "dsp_arch": "v79",
                "cores": [{"core_id": 0, "perf_profile": "burst", "rpc_control_latency": 100}],
            }
        ],
        "memory": {"mem_type": "shared_buffer"},
        "context": {"weight_sharing_enabled": True},
    },
)
"""The file that `extensions` of an engine names."""


def configurations() -> list[Configuration]:
    """All that Genie's parsers judge."""
    dialogs = {name: changed(DIALOG, **changes) for name, changes in DIALOGS.items()}
    encoders = {name: changed(ENCODER, **changes) for name, changes in _ENCODERS.items()}
    return [
        *(
            Configuration(n, each, _like(each) if DIALOGS[n] else None)
            for n, each in dialogs.items()
        ),
        *(
            Configuration(n, each, ENCODER if _ENCODERS[n] else None)
            for n, each in encoders.items()
        ),
        *(Configuration(name, each, _like(each)) for name, each in _others().items()),
        *(Configuration(f"node {name}", each, _node_base(each)) for name, each in _nodes().items()),
    ]


def _node_base(values: Values) -> Values:
    (name,) = values
    return {name: {"text-generator": DIALOG["dialog"]}.get(name, ENCODER["embedding"])}


def _like(values: Values) -> Values:
    """What has been mutated before, in the shape of a configuration."""
    engine = DIALOG["dialog"]["engine"]
    if isinstance(values.get("dialog", {}).get("engine"), list):
        return changed(DIALOG, **{"dialog/engine": [engine, engine]})
    return {**DIALOG, "standalone-engine": DIALOG["dialog"], "sampler": DIALOG["dialog"]["sampler"]}


_BLOCKS: dict[str, Changes] = {
    "ssd-q1": _SSD,
    "spd": _SPD,
    "eaglet": _EAGLET,
    "lade": {"dialog/lade": {"version": 1}},
    "kv-share": {"dialog/kv-share": {}},
    "multistream": _block("multistream", n_streams=2),
}
_MISFITS: dict[str, Changes] = {
    **{f"basic with {name}": block | {TYPE: "basic"} for name, block in _BLOCKS.items()},
    **{
        f"{name} without its block": {TYPE: name}
        for name in ("ssd-q1", "spd", "eaglet", "multistream")
    },
    "spd with one engine": _SPD,
    "basic with two engines": _two_engines("target", "draft"),
    "basic with a role": {"dialog/engine/role": "target"},
    "spd with the roles of kv-share": _two_engines("primary", "secondary") | _SPD,
    "spd with one role twice": _two_engines("target", "target") | _SPD,
    "kv-share with the roles of spd": _two_engines("target", "draft") | {TYPE: "kv-share"},
    "positions twice": {f"{HTP}/pos-id-dim": 64},
    "lazy without switching": {f"{HTP}/graph-switching-lora-policy": "lazy"},
    "shared without async": {f"{HTP}/shared-engine": True},
    "two backends": {"dialog/engine/backend/QnnGenAiTransformer": {"version": 1}},
    "two models": {"dialog/engine/model/library": {"version": 1, "model-bin": "m"}},
    "inputs as sections": _lora(lora_version=1, adapters=[_SECTIONS]),
    "sections as inputs": _lora(lora_version=2, adapters=[_ADAPTER]),
    "a vector with a table": _vectors(type="callback", **{"lut-path": "t"}),
    "custom with a temperature": {SAMPLER: _CUSTOM | {"temp": 0.5}},
    "more branches than forecasts": _SSD | {"dialog/ssd-q1/branches": [1, 1, 1, 1, 1]},
}


def misfits() -> Iterator[tuple[str, Values]]:
    """Dialogs whose parts are valid, and do not fit together."""
    return ((name, changed(DIALOG, **changes)) for name, changes in _MISFITS.items())


@dataclass(frozen=True)
class Mutation:
    """A configuration with one change.

    Attributes:
        change: in words, with the JSON pointer of the place.
        around: JSON pointer of the object or array around that place.
    """

    change: str
    around: str
    text: bytes


def mutations(configuration: Configuration) -> Iterator[Mutation]:
    """Every single-field change of what a configuration has beyond its base."""
    for path, value in places(configuration.values, configuration.base):
        where = "".join(f"/{step}" for step in path)
        around = where.rpartition("/")[0]
        changes: dict[str, object] = {f"without {where}": ...}
        changes |= {f"{where} = {json.dumps(other)}": other for other in _others_than(value)}
        if isinstance(value, dict):
            changes[f"more in {where}"] = {**value, "surprise": 1}
        for change, other in changes.items():
            yield Mutation(change, around, _with(configuration.values, path, other))


def places(
    values: Any,  # noqa: ANN401 - JSON
    base: Any = None,  # noqa: ANN401 - JSON
    path: Path = (),
) -> Iterator[tuple[Path, Any]]:
    """Keys of all objects and entries of all arrays that the base does not have."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for step, value in items:
        try:
            of_base = base[step]
        except (KeyError, IndexError, TypeError):
            of_base = None
        if of_base == value:
            continue
        first = not isinstance(step, int) or step == 0  # entries of an array are alike
        if of_base is None and first:
            yield (*path, step), value
        if isinstance(value, dict | list) and (first or isinstance(value, dict)):
            yield from places(value, of_base, (*path, step))


def _others_than(value: object) -> list[object]:
    """Values of other types, and beyond every range that a value may have."""
    match value:
        case bool():
            return [None, 1, "true", not value]
        case int():
            return [None, True, "1", 1.5, -1, 0, 2**31, 2**63, [value], {}]
        case float():
            return [None, True, "1", -1, 0, 5, 10**20, [value]]
        case str():
            return [None, True, 1, "", "nonsense", "native", [value]]
        case list():
            return [None, 1, "1", [], {}, [*value, None]]
        case _:
            return [None, 1, "1", [], {}]


def _with(values: Values, path: Path, value: object) -> bytes:
    found = copy.deepcopy(values)
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(found).encode()
