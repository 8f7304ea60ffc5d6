"""Mutations of a model folder: one field of a file that holds some, its bytes, or what it is."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

Rng = np.random.Generator
Apply = Callable[[Rng, Path], str]
T = TypeVar("T")

MODEL, WEIGHTS, ENCODINGS = "model.onnx", "model.safetensors", "model.encodings"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_NEEDED = (MODEL, WEIGHTS, CONFIG, TOKENIZER)
_STRINGS = (
    "", "nothing", "a\nb", "\x00", "..", "../outside.bin", "/dev/zero", "Loop", "Cast", "MatMul",
    "com.microsoft", "-1", "0", "1e3", str(1 << 70), "logits", "x" * 100_000, "\N{SNOWMAN}",
)  # fmt: skip
_INTEGERS = (-9, -1, 0, 1, 2, 7, 11, 24, 33, 99, 1 << 20, 1 << 30)
_REALS = (0.0, -1.0, 1e-40, 3e38, float("nan"), float("inf"))
_VALUES: tuple[Any, ...] = (
    None, True, False, 2**31, 2**64, -(2**70), 0.5, 1e308, -0.0, "1", "y" * 5000, [], [None],
    [[[]]], {}, {"": {}}, {"rope_type": "yarn", "factor": 4.0}, *_STRINGS[:4], *_INTEGERS, *_REALS,
)  # fmt: skip
_TEXTS = (
    b"", b"null", b"[]", b"0", b"NaN", b"[" * 100_000, b'{"a":' * 20_000, b"\xff\xfe{\x00}\x00",
    b'{"version": 1e999}', b"\xed\xa0\x80",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A change to a model folder.

    Attributes:
        apply: makes the change, and describes it.
        weight: relative frequency.
        must_fail: whether no builder may accept the result.
        odd_weights: whether weights may get values for which rounding decides results.
    """

    apply: Apply
    weight: int = 1
    must_fail: bool = False
    odd_weights: bool = False


def pick(rng: Rng, values: Sequence[T]) -> T:
    """Return a random one of `values`."""
    return values[int(rng.integers(len(values)))]


def draw(rng: Rng) -> Mutation:
    """Draw a mutation."""
    weights = np.array([one.weight for one in MUTATIONS], dtype=float)
    return MUTATIONS[int(rng.choice(len(MUTATIONS), p=weights / weights.sum()))]


def damaged(rng: Rng, data: bytes) -> bytes:
    """Return bytes with one kind of damage."""
    at = int(rng.integers(len(data) + 1))
    span = 2 ** int(rng.integers(0, 12))
    turned = bytes(byte ^ (1 << int(rng.integers(8))) for byte in data[at : at + 1])
    return pick(rng, [
        data[:at], data[:at] + data[at + span :], data[:at] + rng.bytes(span) + data[at:],
        data[:at] + bytes(span) + data[at + span :], data[: at + span] + data[at:],
        *[data[:at] + turned + data[at + 1 :]] * 5,
    ])  # fmt: skip


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file; others that are linked to it keep what they have."""
    path.unlink()
    path.write_bytes(data)


def bytes_of(*names: str) -> Apply:
    """Return the damage of one of some files."""

    def apply(rng: Rng, folder: Path) -> str:
        path = folder / pick(rng, names)
        rewrite(path, damaged(rng, path.read_bytes()))
        return f"bytes of {path.name}"

    return apply


def change_json(rng: Rng, holder: Any) -> str:  # noqa: ANN401 - JSON
    """Change, drop or double one value somewhere inside of a JSON object or list; return where."""
    where = ""
    while True:
        keys: list[Any] = list(holder) if isinstance(holder, dict) else [*range(len(holder))]
        key = pick(rng, keys)
        where += f".{key}"
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.1:
            break
        holder = inner
    how = rng.random()
    if how < 0.2:
        del holder[key]
    elif how < 0.3:
        if isinstance(holder, dict):
            holder[str(pick(rng, keys)) + "_x"] = inner
        else:
            holder.append(inner)
    elif isinstance(inner, int | float) and not isinstance(inner, bool) and how < 0.6:
        holder[key] = pick(rng, [2 * inner, 1.01 * inner, inner + 1, inner - 1, -inner])
    else:
        holder[key] = pick(rng, _VALUES)
    return where


def json_field(rng: Rng, folder: Path) -> str:
    path = folder / pick(rng, [ENCODINGS, CONFIG])
    data = json.loads(path.read_text())
    what = change_json(rng, data)
    rewrite(path, json.dumps(data).encode())
    return path.name + what


def onnx_field(rng: Rng, folder: Path) -> str:
    """Change one field of the model: cycles, wrong shapes and types, foreign files come of it."""
    path = folder / MODEL
    model = onnx.ModelProto.FromString(path.read_bytes())
    holder: Any = model
    where = ""
    while True:
        fields = [field for field, _ in holder.ListFields()]
        if not fields or rng.random() < 0.05:
            fields = list(holder.DESCRIPTOR.fields)
        nested = [field for field in fields if field.message_type is not None]
        name = pick(rng, [*fields, *nested * 6]).name
        value, where = getattr(holder, name), f"{where}.{name}"
        nests = hasattr(value, "ListFields")
        if nests and value.ListFields():
            holder = value
        elif not nests and not isinstance(value, str | bytes | int | float):
            at = int(rng.integers(len(value))) if value else 0
            where += f"[{at}]"
            if value and rng.random() < 0.85 and hasattr(value[at], "ListFields"):
                holder = value[at]
                continue
            _change_list(rng, value, at, model)
            break
        else:
            if nests:
                value.SetInParent()
            elif rng.random() < 0.15:
                holder.ClearField(name)
            else:
                setattr(holder, name, _other(rng, value, model))
            break
    rewrite(path, model.SerializeToString())
    return f"{MODEL}{where}"


def _change_list(rng: Rng, values: Any, at: int, model: onnx.ModelProto) -> None:  # noqa: ANN401
    """Change entries of a repeated field: drop, double or reverse them, or replace one."""
    how = rng.random()
    if not values:
        values.add() if hasattr(values, "add") else values.append(1)
    elif how < 0.25:
        del values[at]
    elif how < 0.5:
        values.append(values[at])
    elif how < 0.6 or hasattr(values[at], "ListFields"):
        kept = list(values)
        del values[:]
        values.extend(reversed(kept))
    else:
        values[at] = _other(rng, values[at], model)


def _other(rng: Rng, value: Any, model: onnx.ModelProto) -> Any:  # noqa: ANN401 - of any type
    """Return another value of the type of one; for a text often one that the model has."""
    match value:
        case bytes():
            return damaged(rng, value)
        case str():
            every = [name for node in model.graph.node for name in (*node.output, node.op_type)]
            every += [one.name for one in (*model.graph.input, *model.graph.initializer)]
            return pick(rng, every if rng.random() < 0.5 else _STRINGS)
        case float():
            return pick(rng, _REALS)
        case _:
            return pick(rng, [value - 1, value + 1, *_INTEGERS])


def text_replaced(rng: Rng, folder: Path) -> str:
    name = pick(rng, [ENCODINGS, CONFIG, TOKENIZER])
    rewrite(folder / name, text := pick(rng, _TEXTS))
    return f"{name}: {text[:20]!r}"


def weights_truncated(rng: Rng, folder: Path) -> str:
    data = (folder / WEIGHTS).read_bytes()
    rewrite(folder / WEIGHTS, data[: (size := int(rng.integers(len(data))))])
    return f"{WEIGHTS} cut to {size} of {len(data)} bytes"


def weights_odd(rng: Rng, folder: Path) -> str:
    data = bytearray((folder / WEIGHTS).read_bytes())
    at = int(rng.integers(4000, len(data) - 4)) // 4 * 4
    data[at : at + 4] = np.float32(value := pick(rng, _REALS)).tobytes()
    rewrite(folder / WEIGHTS, bytes(data))
    return f"{WEIGHTS}: {value} at {at}"


def file_is_no_file(rng: Rng, folder: Path) -> str:
    path = folder / pick(rng, _NEEDED)
    path.unlink()
    match kind := pick(rng, ["missing", "folder", "fifo", "loop", "dangling", "device"]):
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(folder / "nowhere")
        case "device":
            path.symlink_to("/dev/zero")
    return f"{path.name} is a {kind}"


def file_is_linked(rng: Rng, folder: Path) -> str:
    """The right file behind a symbolic link, inside or outside the folder."""
    path = folder / pick(rng, _NEEDED)
    real = pick(rng, [folder, folder.parent]) / f"real.{path.name}"
    shutil.move(path, real)
    path.symlink_to(real)
    return f"{path.name} is a link to {real}"


def file_takes_anothers_place(rng: Rng, folder: Path) -> str:
    one, other = pick(rng, _NEEDED), pick(rng, _NEEDED)
    rewrite(folder / one, (folder / other).read_bytes())
    return f"{one} holds {other}"


MUTATIONS = (
    Mutation(onnx_field, 16, odd_weights=True),
    Mutation(json_field, 10),
    Mutation(bytes_of(MODEL, ENCODINGS, CONFIG, TOKENIZER), 8, odd_weights=True),
    Mutation(bytes_of(WEIGHTS), odd_weights=True),
    Mutation(weights_odd, odd_weights=True),
    Mutation(weights_truncated, must_fail=True),
    Mutation(text_replaced, must_fail=True),
    Mutation(file_is_no_file, 2, must_fail=True),
    Mutation(file_is_linked),
    Mutation(file_takes_anothers_place),
)
