"""A folder in Hugging Face layout, made of a GGUF file."""

import json
from importlib.util import find_spec
from pathlib import Path

from buildlib.checkpoint.config import check_checkpoint_config
from buildlib.checkpoint.gguf.config import Metadata, read_config
from buildlib.checkpoint.gguf.tokenizer import GgufTokenizer
from buildlib.checkpoint.gguf.weights import GgufWeights
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE
from buildlib.errors import InputFileError
from buildlib.files import atomic_write_bytes
from buildlib.gguf import GgufHeader


def write_checkpoint(path: Path, folder: Path) -> None:
    """Write configuration, weights, tokenizer and chat template of a GGUF into a new folder.

    Raises:
        InputFileError: the file is damaged, or its types need a package.
        ModelFileError: it holds no model that builds.
    """
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
