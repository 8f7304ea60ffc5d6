"""Mutations of encodings, configuration and tokenizer."""

import json
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import ODD_VALUES, Rng, damaged, flipped, mutation, pick, rewrite

ENCODINGS, CONFIG, TOKENIZER = "model.encodings", "config.json", "tokenizer.json"
_KEYS = ("activation_encodings", "param_encodings")
_WHOLE = (
    b"null", b"[]", b"{}", b"0", b'"text"', b"NaN", b"[" * 100_000, b'{"a":' * 20_000,
    b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"version": "1.0.0"}', b"1" * 6000,
    b'{"version": 1e999}', b"\xed\xa0\x80",
)  # fmt: skip


def load(path: Path) -> Any:  # noqa: ANN401  (JSON)
    return json.loads(path.read_text())


def store(path: Path, data: object) -> None:
    rewrite(path, json.dumps(data).encode())


@mutation(weight=3)
def text_damage(rng: Rng, folder: Path) -> str:
    name = pick(rng, [ENCODINGS, ENCODINGS, CONFIG, TOKENIZER])
    path = folder / name
    data, what = pick(rng, [damaged, flipped])(rng, path.read_bytes())
    rewrite(path, data)
    return f"{name}: {what}"


@mutation(must_fail=True)
def text_replaced(rng: Rng, folder: Path) -> str:
    name, whole = pick(rng, [ENCODINGS, CONFIG, TOKENIZER]), pick(rng, _WHOLE)
    rewrite(folder / name, whole)
    return f"{name}: {whole[:20]!r} of {len(whole)} bytes"


@mutation(weight=3)
def json_value(rng: Rng, folder: Path) -> str:
    name = pick(rng, [ENCODINGS, CONFIG, CONFIG])
    data = load(folder / name)
    holder, where = data, ""
    while True:
        keys: list[Any] = list(holder) if isinstance(holder, dict) else [*range(len(holder))]
        key = pick(rng, keys)
        where += f".{key}"
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.1:
            break
        holder = inner
    if rng.random() < 0.3:
        del holder[key]
        what = "deleted"
    else:
        holder[key] = pick(rng, ODD_VALUES)
        what = repr(holder[key])[:40]
    store(folder / name, data)
    return f"{name}{where}: {what}"


@mutation(weight=3)
def encoding_field(rng: Rng, folder: Path) -> str:
    """A plausible value in the wrong place, which no parser can refuse."""
    data = load(folder / ENCODINGS)
    entry = pick(rng, data[pick(rng, _KEYS)])
    field: str = pick(rng, ["bw", "scale", "offset", "enc_type", "is_sym", "dtype"])
    entry[field] = {
        "bw": pick(rng, [1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 64]),
        "scale": [pick(rng, [0.0, -1.0, 1e-40, 1e-9, 1e9, 1e300])] * len(entry["scale"]),
        "offset": [int(pick(rng, [0, 1, -1, -127, -128, -129, -256, -65536]))]
        * len(entry["offset"]),
        "enc_type": pick(rng, ["PER_TENSOR", "PER_CHANNEL", "PER_BLOCK", "LPBQ", "VECTOR", "X"]),
        "is_sym": not entry["is_sym"],
        "dtype": pick(rng, ["INT", "FLOAT", "float", "UINT"]),
    }[field]
    store(folder / ENCODINGS, data)
    return f"encoding of {entry['name']}: {field} = {str(entry[field])[:40]}"


@mutation()
def encoding_channels(rng: Rng, folder: Path) -> str:
    data = load(folder / ENCODINGS)
    entry = pick(rng, [one for one in data["param_encodings"] if len(one["scale"]) > 1])
    keep = pick(rng, [0, 1, len(entry["scale"]) - 1, len(entry["scale"]) + 1])
    for field in ("scale", "offset"):
        entry[field] = (entry[field] * 2)[:keep]
    store(folder / ENCODINGS, data)
    return f"encoding of {entry['name']}: {keep} channels"


@mutation(must_fail=True)
def encoding_of_nothing(rng: Rng, folder: Path) -> str:
    """Encodings for a tensor that does not exist."""
    data = load(folder / ENCODINGS)
    group = data[pick(rng, _KEYS)]
    entry = dict(pick(rng, group))
    entry["name"] = pick(rng, ["nothing", entry["name"] + "_x", "a\nb", "\x00", "n" * 3000])
    group.append(entry)
    store(folder / ENCODINGS, data)
    return f"encoding of {entry['name'][:40]!r}, which is not there"


@mutation()
def encoding_dropped(rng: Rng, folder: Path) -> str:
    data = load(folder / ENCODINGS)
    entry = data[key := pick(rng, _KEYS)].pop(int(rng.integers(len(data[key]))))
    store(folder / ENCODINGS, data)
    return f"encoding of {entry['name']} dropped"


@mutation(must_fail=True)
def encoding_twice(rng: Rng, folder: Path) -> str:
    data = load(folder / ENCODINGS)
    group = data[pick(rng, _KEYS)]
    entry = dict(pick(rng, group))
    entry["scale"] = [2 * scale for scale in entry["scale"]]
    group.append(entry)
    store(folder / ENCODINGS, data)
    return f"two encodings of {entry['name']}"


@mutation(must_fail=True)
def encodings_of_caches_differ(rng: Rng, folder: Path) -> str:
    """Give a cache input and output different encodings, which must agree."""
    data = load(folder / ENCODINGS)
    caches = [one for one in data["activation_encodings"] if one["name"].startswith("past_")]
    entry = pick(rng, caches)
    entry["scale"] = [entry["scale"][0] * float(pick(rng, [0.5, 1.25, 2.0]))]
    store(folder / ENCODINGS, data)
    return f"the scale of {entry['name']} alone is changed"


@mutation(must_fail=True)
def config_of_another_model(rng: Rng, folder: Path) -> str:
    """Sizes that the ONNX contradicts: Genie would be configured for another model."""
    data = load(folder / CONFIG)
    field = pick(rng, ["vocab_size", "head_dim", "num_hidden_layers", "num_key_value_heads"])
    data[field] = {
        "vocab_size": int(pick(rng, [32, 63, 65, 128, 1 << 24])),
        "head_dim": int(pick(rng, [2, 8, 12, 20, 4096])),
        "num_hidden_layers": int(pick(rng, [1, 3, 1000])),
        "num_key_value_heads": int(pick(rng, [1, 4])),
    }[field]
    store(folder / CONFIG, data)
    return f"config.json: {field} = {data[field]}"


@mutation()
def config_number(rng: Rng, folder: Path) -> str:
    data = load(folder / CONFIG)
    field = pick(rng, [key for key, value in data.items() if isinstance(value, int | float)])
    values = (-1, 0, 1, 2, 7, 1 << 20, 1 << 24, (1 << 24) + 1, 1 << 40, 1e-30, 1e30, 0.5)
    data[field] = pick(rng, values)
    store(folder / CONFIG, data)
    return f"config.json: {field} = {data[field]}"


@mutation()
def config_addition(rng: Rng, folder: Path) -> str:
    data = load(folder / CONFIG)
    added: dict[str, Any] = pick(
        rng,
        [
            {"rope_scaling": pick(rng, ODD_VALUES)},
            {"rope_scaling": {"rope_type": "llama3", "factor": 0.0}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": pick(rng, ODD_VALUES)}},
            {"model_type": pick(rng, ["qwen2", "qwen3", "phi3", "gpt2", "", "a\nb"])},
            {"architectures": pick(rng, ODD_VALUES)},
            {"partial_rotary_factor": pick(rng, [0.0, 0.5, 1.5, -1])},
            {"eos_token_id": pick(rng, [[], [1, 2], [64], [-1], [None], list(range(64))])},
            {"bos_token_id": pick(rng, [None, 63, 64, "0"])},
            {"x" * 1000: "y" * (2 << 20)},
        ],
    )
    store(folder / CONFIG, data | added)
    return f"config.json: {str(added)[:80]}"
