"""Valid Genie configurations, one for each thing that is documented, and their mutations."""

import copy
import json
from collections.abc import Callable, Iterator
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
            place[last] = copy.deepcopy(value)
    return found


def _two_engines(first: str, second: str, **changes: object) -> Values:
    engine = DIALOG["dialog"]["engine"]
    engines = [{**copy.deepcopy(engine), "role": first}, {**copy.deepcopy(engine), "role": second}]
    return changed(DIALOG, **{"dialog/engine": engines, **changes})


def _scaled(**scaling: object) -> Values:
    keys = {key.replace("_", "-"): value for key, value in scaling.items()}
    return changed(DIALOG, **{f"{POSITIONS}/rope-scaling": keys})


def _lora(**block: object) -> Values:
    keys = {key.replace("_", "-"): value for key, value in block.items()}
    return changed(DIALOG, **{LORA: {"version": 1, "alpha-tensor-name": "alpha", **keys}})


def _table(datatype: str) -> Values:
    table = {"version": 1, "type": "lut", "lut-path": "t", "size": 64, "datatype": datatype}
    grid = {"quant-param": {"scale": 0.25, "offset": -3}} if "fixed" in datatype else {}
    return changed(DIALOG, **{"dialog/embedding": table | grid})


def _vectors(**block: object) -> Values:
    return changed(DIALOG, **{"dialog/embedding": {"version": 1, "size": 64, **block}})


_SSD = {
    "version": 1, "ssd-version": 1, "forecast-token-count": 4, "branches": [3, 2],
    "forecast-prefix": 16, "forecast-prefix-name": "forecast-prefix",
}  # fmt: skip
_EAGLET = {
    "version": 1, "eaglet-version": 2, "draft-len": 5, "n-branches": 8,
    "max-tokens-target-can-evaluate": 32, "draft-kv-cache": True,
}  # fmt: skip
_ADAPTER = {"version": 1, "name": "first", "path": "lora/first"}
_SECTIONS = {"version": 1, "name": "first", "bin-sections": ["1.bin", "2.bin"]}
_GROUP = {"version": 1, "name": "g", "members": ["first"], "quant-bin-sections": ["q.bin"]}
_WINDOW = {
    "version": 1, "type": "sliding-window", "reserved-tokens": 4,
    "sliding-window": {"version": 1, "window-size": 64},
}  # fmt: skip
_KEYDIFF = {
    "version": 1, "type": "keydiff", "reserved-tokens": 4,
    "keydiff": {"version": 1, "scoring-network": "scores.bin", "update-frequency": 64},
}  # fmt: skip
_TRANSFORMER = {
    "version": 1, "type": "QnnGenAiTransformer",
    "QnnGenAiTransformer": {
        "version": 1, "n-logits": 1, "n-layer": 32, "n-embd": 4096, "n-heads": 32,
        "n-kv-heads": 8, "kv-quantization": True, "use-mmap": True,
    },
}  # fmt: skip
_TRANSFORMED = changed(
    DIALOG, **{"dialog/engine/backend": _TRANSFORMER, "dialog/engine/model": LIBRARY}
)
_SECONDARY = {
    "version": 1, "role": "secondary", "n-threads": 4, "backend": _TRANSFORMER, "model": LIBRARY,
}  # fmt: skip


def _dialogs() -> Iterator[tuple[str, Values]]:
    yield "dialog basic", DIALOG
    yield (
        "dialog ssd-q1",
        changed(DIALOG, **{"dialog/type": "ssd-q1", "dialog/ssd-q1": _SSD}),
    )
    streams = _SSD | {"n-streams": 2, "p-threshold": 0.1}
    yield (
        "dialog ssd-q1 with n-streams",
        changed(DIALOG, **{"dialog/type": "ssd-q1", "dialog/ssd-q1": streams}),
    )
    lade = {"version": 1, "update-mode": "FWD_MAX_HIT", "window": 8, "ngram": 5, "gcap": 8}
    yield "dialog lade", changed(DIALOG, **{"dialog/type": "lade", "dialog/lade": lade})
    yield "dialog lade without options", changed(DIALOG, **{"dialog/type": "lade"})
    spd = {"dialog/type": "spd", "dialog/spd": {"version": 1, "draft-len": 7}}
    yield "dialog spd", _two_engines("target", "draft", **spd)
    streams = {"version": 1, "n-streams": 8, "p-threshold": 0.5}
    yield (
        "dialog multistream",
        changed(DIALOG, **{"dialog/type": "multistream", "dialog/multistream": streams}),
    )
    eaglet = {"dialog/type": "eaglet", "dialog/eaglet": _EAGLET}
    yield "dialog eaglet", _two_engines("draft", "target", **eaglet)
    mapped = eaglet | {
        "dialog/engine/1/model/draft-token-map": "map.json",
        "dialog/context/draft-n-vocab": 8000,
    }
    yield "dialog eaglet with draft-token-map", _two_engines("target", "draft", **mapped)
    shared = _two_engines("primary", "secondary", **{"dialog/type": "kv-share"})
    shared["dialog"]["engine"][1] = copy.deepcopy(_SECONDARY)
    yield "dialog kv-share", shared
    yield (
        "context with eot, pad, n-embd, several eos",
        changed(
            DIALOG,
            **{
                "dialog/context/eos-token": [2, 3],
                "dialog/context/eot-token": 4,
                "dialog/context/pad-token": 0,
                "dialog/context/n-embd": 4096,
            },
        ),
    )


def _samplers() -> Iterator[tuple[str, Values]]:
    penalty = {
        "version": 1, "penalize-last-n": 64, "repetition-penalty": 1.1, "presence-penalty": 0.1,
        "frequency-penalty": -0.1,
    }  # fmt: skip
    sampler = "dialog/sampler"
    yield "sampler with token-penalty", changed(DIALOG, **{f"{sampler}/token-penalty": penalty})
    yield (
        "sampler basic",
        changed(DIALOG, **{sampler: {"version": 1, "type": "basic", "greedy": False}}),
    )
    yield (
        "sampler greedy",
        changed(DIALOG, **{sampler: {"version": 1, "greedy": True, "top-k": 1}}),
    )
    yield (
        "sampler custom",
        changed(DIALOG, **{sampler: {"version": 1, "type": "custom", "callback-name": "choose"}}),
    )
    yield "sampler of Genie's own defaults", changed(DIALOG, **{sampler: {"version": 1}})


def _embeddings() -> Iterator[tuple[str, Values]]:
    for datatype in ("float32", "ufixed8", "ufixed16", "sfixed8", "sfixed16"):
        yield f"embedding lut {datatype}", _table(datatype)
    for datatype in ("float32", "native", "ufixed8", "ufixed16", "sfixed8", "sfixed16"):
        yield f"embedding callback {datatype}", _vectors(type="callback", datatype=datatype)
    yield "embedding without type", _vectors()


def _positions() -> Iterator[tuple[str, Values]]:
    yield "rope-scaling default", _scaled(rope_type="default")
    yield "rope-scaling linear", _scaled(rope_type="linear", factor=4.0)
    llama = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    yield "rope-scaling llama3", _scaled(**llama)
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.5] * 64}
    yield (
        "rope-scaling longrope",
        _scaled(rope_type="longrope", factor=1.0, original_max_position_embeddings=4096, **factors),
    )
    for name in ("qwen2vl-mrope", "qwen3vl-mrope"):
        seen = {"mrope_section": [16, 24, 24], "time_step": 50, "spatial_merge_size": 2}
        yield f"rope-scaling {name}", _scaled(rope_type=name, **seen)
    yield (
        "rope-scaling proportional",
        _scaled(rope_type="proportional", factor=1.0, partial_rotary_factor=0.25),
    )
    for kind in ("alibi", "absolute", "none"):
        yield f"positional-encoding {kind}", changed(DIALOG, **{POSITIONS: {"type": kind}})
    yield (
        "positions of QnnHtp",
        changed(DIALOG, **{POSITIONS: ..., f"{HTP}/pos-id-dim": 64, f"{HTP}/rope-theta": 10000.0}),
    )


def _engines() -> Iterator[tuple[str, Values]]:
    yield "QnnHtp data-alignment-size", changed(DIALOG, **{f"{HTP}/data-alignment-size": 64})
    yield "QnnHtp spill-fill-bufsize", changed(DIALOG, **{f"{HTP}/spill-fill-bufsize": 320000000})
    yield "QnnHtp direct-io", changed(DIALOG, **{f"{HTP}/direct-io": True})
    yield (
        "QnnHtp shared-engine",
        changed(DIALOG, **{f"{HTP}/shared-engine": True, f"{HTP}/allow-async-init": True}),
    )
    switching = {f"{HTP}/enable-graph-switching": True}
    yield "QnnHtp enable-graph-switching", changed(DIALOG, **switching)
    for policy in ("lazy", "eager"):
        yield (
            f"QnnHtp graph-switching-lora-policy {policy}",
            changed(DIALOG, **switching, **{f"{HTP}/graph-switching-lora-policy": policy}),
        )
    for method in ("POINTER_SHIFT", "SHIFT_CONCAT", "SMART_MASK", "NATIVE_KV"):
        yield (
            f"QnnHtp kv-update-method {method}",
            changed(DIALOG, **{f"{HTP}/kv-update-method": method}),
        )
    yield "longcontext sliding-window", changed(DIALOG, **{"dialog/engine/longcontext": _WINDOW})
    yield "longcontext keydiff", changed(DIALOG, **{"dialog/engine/longcontext": _KEYDIFF})
    group = {
        "version": 1, "prefix": "past_", "attention-mask-tensor-name": "attention_mask",
        "cache-index-tensor-name": "cache_index", "longcontext": _WINDOW,
    }  # fmt: skip
    groups = [group, {"version": 1, "prefix": "global_"}]
    yield "cache-groups", changed(DIALOG, **{"dialog/engine/cache-groups": groups})
    gpu = {"version": 1, "type": "QnnGpu"}
    yield "QnnGpu", changed(DIALOG, **{"dialog/engine/backend": gpu})
    yield "QnnGenAiTransformer", _TRANSFORMED


def _adapters() -> Iterator[tuple[str, Values]]:
    yield "LoRA v1", _lora(lora_version=1, adapters=[_ADAPTER])
    yield "LoRA bin-sections", _lora(adapters=[_SECTIONS])
    alphas = _SECTIONS | {"alphas": ["first_alpha"]}
    yield "LoRA v2 with groups", _lora(lora_version=2, adapters=[alphas], groups=[_GROUP])
    yield "LoRA v3", _lora(lora_version=3, adapters=[_SECTIONS])
    yield (
        "QnnHtp skip-lora-validation",
        changed(DIALOG, **{f"{HTP}/skip-lora-validation": True}),
    )
    block = {"version": 1, "alpha-tensor-name": "alpha", "adapters": [_SECTIONS]}
    yield (
        "LoRA QnnGenAiTransformer",
        changed(_TRANSFORMED, **{"dialog/engine/model/library/lora": block}),
    )


def _encoders() -> Iterator[tuple[str, Values]]:
    yield "text-to-embedding QnnHtp", ENCODER
    htp = "embedding/engine/backend/QnnHtp"
    options = {f"{htp}/data-alignment-size": 64, f"{htp}/pooled-output": False}
    yield "text-to-embedding per token", changed(ENCODER, **options)
    yield "text-to-embedding direct-io", changed(ENCODER, **{f"{htp}/direct-io": True})
    positions = {"embedding/engine/model/positional-encoding": {"type": "rope", "rope-dim": 64}}
    yield "text-to-embedding with rope", changed(ENCODER, **positions)
    block = {"version": 1, "n-layer": 24, "n-embd": 1024, "n-heads": 16}
    backend = {"version": 1, "type": "QnnGenAiTransformer", "QnnGenAiTransformer": block}
    yield (
        "text-to-embedding QnnGenAiTransformer",
        changed(
            ENCODER, **{"embedding/engine/backend": backend, "embedding/engine/model": LIBRARY}
        ),
    )


def _others() -> Iterator[tuple[str, Values]]:
    dialog = _table("ufixed16")["dialog"]
    engine = {key: dialog[key] for key in ("version", "context", "embedding", "engine")}
    yield "standalone engine", {"standalone-engine": engine}
    yield "standalone sampler", {"sampler": dialog["sampler"]}
    custom = {"version": 1, "type": "custom", "callback-name": "choose"}
    yield "standalone sampler custom", {"sampler": custom}
    yield "profile", {"profile": {"version": 1}}
    yield "profile with trace", {"profile": {"version": 1, "trace": {"version": 1, "enable": True}}}
    yield "accuracy", {"dataset": "text.txt", "type": "perplexity"}
    engine = {"convert-to-basic": True, "role": "target"}
    yield "accuracy of a role", {"dataset": "t.txt", "type": "perplexity", "engine": engine}


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
"""The file that `extensions` of an engine names; Genie has no parser to ask about it."""


def configurations() -> list[Configuration]:
    """All that Genie's parsers judge."""
    of_dialogs: tuple[Callable[[], Iterator[tuple[str, Values]]], ...] = (
        _dialogs, _samplers, _embeddings, _positions, _engines, _adapters,
    )  # fmt: skip
    found = [
        Configuration(name, values, None if values is DIALOG else _like(values))
        for part in of_dialogs
        for name, values in part()
    ]
    found += [
        Configuration(name, values, None if values is ENCODER else ENCODER)
        for name, values in _encoders()
    ]
    return found + [Configuration(name, values, _like(values)) for name, values in _others()]


def _like(values: Values) -> Values:
    """What has been mutated before, in the shape of a configuration."""
    engine = DIALOG["dialog"]["engine"]
    if isinstance(values.get("dialog", {}).get("engine"), list):
        return changed(DIALOG, **{"dialog/engine": [engine, engine]})
    return {**DIALOG, "standalone-engine": DIALOG["dialog"], "sampler": DIALOG["dialog"]["sampler"]}


def misfits() -> Iterator[tuple[str, Values]]:
    """Dialogs whose parts are valid, and do not fit together."""
    spd = {"version": 1, "draft-len": 7}
    blocks = {"ssd-q1": _SSD, "spd": spd, "eaglet": _EAGLET, "lade": {"version": 1}, "kv-share": {}}
    blocks["multistream"] = {"version": 1, "n-streams": 2}
    for name, block in blocks.items():
        yield f"basic with {name}", changed(DIALOG, **{f"dialog/{name}": block})
    for name in ("ssd-q1", "spd", "eaglet", "multistream"):
        yield f"{name} without its block", changed(DIALOG, **{"dialog/type": name})
    yield "spd with one engine", changed(DIALOG, **{"dialog/type": "spd", "dialog/spd": spd})
    yield "basic with two engines", _two_engines("target", "draft")
    yield "basic with a role", changed(DIALOG, **{"dialog/engine/role": "target"})
    drafted = {"dialog/type": "spd", "dialog/spd": spd}
    yield "spd with the roles of kv-share", _two_engines("primary", "secondary", **drafted)
    yield "spd with one role twice", _two_engines("target", "target", **drafted)
    shared = {"dialog/type": "kv-share"}
    yield "kv-share with the roles of spd", _two_engines("target", "draft", **shared)
    yield "positions twice", changed(DIALOG, **{f"{HTP}/pos-id-dim": 64})
    yield (
        "lazy without switching",
        changed(DIALOG, **{f"{HTP}/graph-switching-lora-policy": "lazy"}),
    )
    yield "shared without async", changed(DIALOG, **{f"{HTP}/shared-engine": True})
    yield (
        "two backends",
        changed(DIALOG, **{"dialog/engine/backend/QnnGenAiTransformer": {"version": 1}}),
    )
    yield (
        "two models",
        changed(DIALOG, **{"dialog/engine/model/library": {"version": 1, "model-bin": "m"}}),
    )
    yield "inputs as sections", _lora(lora_version=1, adapters=[_SECTIONS])
    yield "sections as inputs", _lora(lora_version=2, adapters=[_ADAPTER])
    yield "a vector with a table", _vectors(type="callback", **{"lut-path": "t"})
    custom = {"version": 1, "type": "custom", "callback-name": "choose", "temp": 0.5}
    yield "custom with a temperature", changed(DIALOG, **{"dialog/sampler": custom})
    more = _SSD | {"branches": [1, 1, 1, 1, 1]}
    yield (
        "more branches than forecasts",
        changed(DIALOG, **{"dialog/type": "ssd-q1", "dialog/ssd-q1": more}),
    )


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
