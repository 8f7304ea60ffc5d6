"""The tokenizer of a container on the host: to count, to cut, and to read ids."""

from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import WrongUseError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(path: Path) -> "Tokenizer":
    """Read a `tokenizer.json`, without its truncation and padding."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WrongUseError(f"cannot read the tokenizer {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the ids of a text, without the special tokens that some tokenizers add."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
