"""A folder in Hugging Face layout, made of a GGUF file."""

import json
from importlib.util import find_spec
from pathlib import Path

from buildlib.checkpoint.config import check_checkpoint_config
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE
from buildlib.errors import InputFileError
from buildlib.files import atomic_write_bytes
from buildlib.gguf import GgufHeader
from plugins.gguf.config import Metadata, read_config
from plugins.gguf.tokenizer import GgufTokenizer
from plugins.gguf.weights import GgufWeights

LIBRARIES = ("gguf",)


def write_checkpoint(path: Path, folder: Path) -> None:
    """See `CheckpointReader`: configuration, weights, tokenizer and chat template."""
    if find_spec("gguf") is None:
        raise InputFileError(str(path), "it needs gguf: pip install 'qnnfarm[gguf]'")
    model = Metadata(GgufHeader.read(path))
    tokenizer = GgufTokenizer(model)
    keys = read_config(model) | tokenizer.special_ids
    weights = GgufWeights(model, check_checkpoint_config(keys, path))
    folder.mkdir()
    files = {
        CONFIG_FILE: keys,
        "generation_config.json": tokenizer.generation_config(),
        "tokenizer_config.json": tokenizer.tokenizer_config(),
        TOKENIZER_FILE: tokenizer.tokenizer(),
    }
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=1 if name == CONFIG_FILE else None)
        atomic_write_bytes(folder / name, text.encode("utf-8", "replace"))
    weights.save(folder / "model.safetensors")


def inspect(path: Path, *, every: bool, json: bool) -> None:
    """See `CheckpointReader`."""
    from plugins.gguf.contents import print_model

    print_model(GgufHeader.read(path), every=every, json=json)
