"""GGUF files of random models of every family, as llama.cpp's own converter writes them.

`tests/fixtures/gguf.json` has what `convert_hf_to_gguf.py` made of the folders of `write_source`:
all keys, and the name, shape and hash of each tensor. The tensors themselves are made here again,
and each is held against its hash, so that the reader is judged by what llama.cpp wrote.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from tests.buildlib.families import family_config, write_checkpoint

CONVERTED: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "gguf.json").read_text()
)
CHANGES: Mapping[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3": {"query_pre_attn_scalar": 12, "num_hidden_layers": 7, "layer_types": None},
    "glm": {"head_dim": 8, "max_position_embeddings": 32, "rms_norm_eps": 1e-5},
    "llama-biases": {"hidden_act": "silu"},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
}
"""Of the fixtures of families: what a GGUF cannot say otherwise."""
_PERMUTED = ("llama", "granite", "smollm3")
_TOKENS = ("<unk>", "<s>", "</s>")


def write_source(folder: Path, name: str) -> Path:
    """Write the checkpoint in Hugging Face layout that a GGUF was made of."""
    config = family_config(name) | CHANGES.get(name, {})
    if name == "smollm3":
        config |= {"no_rope_layers": [int((n + 1) % 4 != 0) for n in range(5)]}
        config.pop("layer_types", None)
    return write_checkpoint(folder, {k: v for k, v in config.items() if v is not None})


def write_gguf(
    path: Path,
    source: Path,
    name: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: str = "",
) -> Path:
    """Write the GGUF of a checkpoint, its matrices in another type where their rows allow it."""
    made = CONVERTED[name]
    architecture = made["keys"]["general.architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in made["keys"].items():
        _add_key(writer, key, value)
    add_tokenizer(writer, made["tensors"]["token_embd.weight"][0][0])
    tensors = dict(_converted(load_file(source / "model.safetensors"), architecture))
    for tensor, (shape, digest) in made["tensors"].items():
        if tensor == without:
            continue
        values = tensors.get(tensor)
        if values is None:
            values = np.array(digest, np.float32)  # rotary factors, which follow from the keys
        else:
            assert list(values.shape) == shape
            assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == digest
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if len(shape) == 2 and shape[1] % block == 0 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = [*_TOKENS, *(chr(0x100 + number) for number in range(size - 3))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_types([2, 3, 3, *([1] * (size - 3))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str() if key != "general.architecture":
            writer.add_string(key, value)


def _converted(
    tensors: Mapping[str, npt.NDArray[Any]], architecture: str
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield tensors under llama.cpp's names, changed as its converter changes them."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 8)
    for name, original in tensors.items():
        values = original
        if architecture in _PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = 4 if "q_proj" in name else 2
            shape = values.shape
            values = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
            values = values.swapaxes(1, 2).reshape(shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        yield str(theirs), np.ascontiguousarray(values)
