"""Mutations of the files as such: external data, and things that are no files."""

import os
import shutil
from pathlib import Path

import numpy as np

from tests.fuzz.mutations import Rng, damaged, flipped, mutation, pick, rewrite

WEIGHTS = "model.safetensors"
_NAMES = ("model.onnx", WEIGHTS, "model.encodings", "config.json", "tokenizer.json")
_NEEDED = ("model.onnx", WEIGHTS, "config.json", "tokenizer.json")


@mutation(must_fail=True)
def weights_truncated(rng: Rng, folder: Path) -> str:
    path = folder / WEIGHTS
    data = path.read_bytes()
    size = int(rng.integers(len(data)))
    rewrite(path, data[:size])
    return f"{WEIGHTS} cut to {size} of {len(data)} bytes"


@mutation(odd_weights=True)
def weights_damaged(rng: Rng, folder: Path) -> str:
    path = folder / WEIGHTS
    data, what = pick(rng, [damaged, flipped])(rng, path.read_bytes())
    rewrite(path, data)
    return f"{WEIGHTS}: {what}"


@mutation(odd_weights=True)
def weights_odd(rng: Rng, folder: Path) -> str:
    """Weights that are numbers in name only."""
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    values = [np.nan, np.inf, -np.inf, 3e38, -1e30, 1e-45]
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(4000, len(data) - 4)) // 4 * 4
        data[at : at + 4] = np.float32(pick(rng, values)).tobytes()
    rewrite(path, bytes(data))
    return f"{WEIGHTS}: odd values"


@mutation(must_fail=True)
def file_missing(rng: Rng, folder: Path) -> str:
    name = pick(rng, _NEEDED)
    (folder / name).unlink()
    return f"{name} is missing"


@mutation(must_fail=True)
def file_is_no_file(rng: Rng, folder: Path) -> str:
    name = pick(rng, _NEEDED)
    path = folder / name
    path.unlink()
    kind = pick(rng, ["folder", "fifo", "loop", "dangling", "device"])
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(folder / "nowhere")
        case _:
            path.symlink_to("/dev/zero")
    return f"{name} is a {kind}"


@mutation()
def file_is_linked(rng: Rng, folder: Path) -> str:
    """The right file behind a symbolic link, inside or outside the folder."""
    name = pick(rng, _NAMES)
    path = folder / name
    inside = rng.random() < 0.5
    real = (folder if inside else folder.parent) / f"real.{name}"
    shutil.move(path, real)
    path.symlink_to(real)
    return f"{name} is a link {'inside' if inside else 'outside'} its folder"


@mutation()
def file_takes_anothers_place(rng: Rng, folder: Path) -> str:
    one, other = pick(rng, _NAMES), pick(rng, _NAMES)
    data = (folder / other).read_bytes()
    rewrite(folder / one, data)
    return f"{one} holds {other}"


@mutation()
def stray_files(rng: Rng, folder: Path) -> str:
    name = pick(rng, ["model.onnx.data", ".hidden", "a\nb", "text", "model.safetensors.index.json"])
    (folder / name).write_bytes(rng.bytes(64))
    return f"a stray file {name!r}"
