"""Llamas of any size with random weights, made at the speed of the disk.

Every matrix is cut from one block of random numbers, each at a place of its own: the values have
the distribution of a trained model's, and no two matrices are equal.
"""

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypedDict

import ml_dtypes
import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.checkpoint import Checkpoint, expected_tensors
from buildlib.checkpoint.config import CheckpointConfig
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape


class Sizes(TypedDict):
    """Dimensions of a model for `make_random_llama`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int


LLAMA_1B: Sizes = {
    "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "mlp": 8192,
    "vocab": 128_256,
}  # fmt: skip
"""Llama-3.2-1B's shape; with a head of its own its float32 weights are 6.0 GB."""

LLAMA_3B: Sizes = {
    "layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128, "mlp": 8192,
    "vocab": 128_256,
}  # fmt: skip
"""Llama-3.2-3B's shape; tied, as that is, its bfloat16 weights are 6.4 GB."""

StoredDtype = Literal["F32", "BF16"]
_NUMPY: dict[StoredDtype, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_BLOCK = 1 << 24
_SMALLEST_SHIFT = 104_729  # a prime: no two matrices begin at one place of the block


def make_random_llama(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    vocab: int,
    shape: GraphShape,
    tied: bool = False,
    sparse: bool = False,
    dtype: StoredDtype = "F32",
) -> Path:
    """Write `config.json`, `model.safetensors` and `model.onnx`; returns the latter's path.

    Args:
        folder: made if it is not there.
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of all heads.
        mlp: width of the gated layer.
        vocab: rows of the embedding.
        shape: that the model is exported at.
        tied: the head is the embedding, stored once.
        sparse: leave the weights a hole in the file, all zero: it takes no room on the disk.
        dtype: of the stored weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": shape.cl,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(data, indent=1))
    tensors = expected_tensors(CheckpointConfig.model_validate(data))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(tensors, dtype))
        if sparse:
            file.truncate(file.tell() + sum(_n_bytes(dims, dtype) for dims in tensors.values()))
        else:
            _write_weights(file, tensors, dtype)
    return export_onnx(Checkpoint.load(folder), shape, folder)


def _header(tensors: dict[str, tuple[int, ...]], dtype: StoredDtype) -> bytes:
    """Return a safetensors header for tensors of one type that follow each other."""
    end = 0
    entries: dict[str, object] = {}
    for name, dims in tensors.items():
        begin, end = end, end + _n_bytes(dims, dtype)
        entries[name] = {"dtype": dtype, "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


def _n_bytes(dims: tuple[int, ...], dtype: StoredDtype) -> int:
    return int(np.prod(dims)) * _NUMPY[dtype].itemsize


def _write_weights(file: BinaryIO, tensors: dict[str, tuple[int, ...]], dtype: StoredDtype) -> None:
    block = np.random.default_rng(7).standard_normal(_BLOCK, np.float32)
    for number, (name, dims) in enumerate(tensors.items()):
        if len(dims) == 1:
            norm = 1.0 + 0.1 * block[number : number + dims[0]]
            file.write(norm.astype(_NUMPY[dtype]).tobytes())
            continue
        deviation = 0.5 if "embed" in name else 1.0 / np.sqrt(dims[1])
        scaled = (block * np.float32(deviation)).astype(_NUMPY[dtype])
        pieces = _pieces(scaled, number * _SMALLEST_SHIFT, int(np.prod(dims)))
        file.writelines(piece.view(np.uint8).data for piece in pieces)


def _pieces(block: npt.NDArray[Any], start: int, count: int) -> Iterator[npt.NDArray[Any]]:
    """Return `count` numbers of the block from `start` on, round and round."""
    while count:
        start %= block.size
        piece = block[start : start + count]
        yield piece
        start += piece.size + 1  # the rounds of one matrix do not line up either
        count -= piece.size


def main() -> None:
    """Write the model of Llama-3.2-1B's shape, or one of other sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in LLAMA_1B.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--ar", type=int, default=128)
    parser.add_argument("--cl", type=int, default=4096)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--dtype", choices=("F32", "BF16"), default="F32")
    parser.add_argument("--sparse", action="store_true", help="weights that are zero, unstored")
    options = vars(parser.parse_args())
    shape = GraphShape(options.pop("ar"), options.pop("cl"))
    print(make_random_llama(options.pop("folder"), shape=shape, **options))


if __name__ == "__main__":
    main()
