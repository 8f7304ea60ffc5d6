"""Text to token ids."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.tiny_llama.architecture import Architecture

Ids = NDArray[np.int64]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def plain(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a text without begin or end of text, `[n]`."""
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def stream(tokenizer: Tokenizer, architecture: Architecture, text: str) -> Ids:
    """Return the ids of a training text, `[n]`, each document between begin and end of text.

    An empty line ends a document.
    """
    ids: list[int] = []
    for document in text.split("\n\n"):
        ids.append(architecture.bos_token_id)
        ids.extend(tokenizer.encode(document.rstrip("\n") + "\n", add_special_tokens=False).ids)
        ids.append(architecture.eos_token_id)
    return np.array(ids, dtype=np.int64)


def windows(ids: Ids, length: int) -> Ids:
    """Cut a text into whole windows, `[n_windows, length]`; drop the rest."""
    whole = len(ids) // length
    return ids[: whole * length].reshape(whole, length)
