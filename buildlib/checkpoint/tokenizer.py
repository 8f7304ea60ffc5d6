"""Tokenizer of a checkpoint, and the windows of tokens that calibration reads."""

from pathlib import Path

from tokenizers import Tokenizer

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import BuildError, ModelFileError
from buildlib.files import check_file

DEFAULT_WINDOWS = 8
_OTHER_MODALITIES = {"<image_soft_token>"}
"""Tokens of text-only Gemma 3 that its embedding has no row for; no text has them."""


def text_windows(
    tokenizer: Path,
    text: str,
    length: int,
    bos_token_id: int,
    n_windows: int = DEFAULT_WINDOWS,
) -> list[list[int]]:
    """Cut windows of tokens from all over a text, as `spread_windows` does."""
    tokens = load_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids
    return spread_windows(tokens, length, n_windows, bos_token_id)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint."""
    try:
        check_file(path)
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(path, error.strerror or "cannot be read") from error
    except Exception as error:  # the library raises bare Exceptions
        raise ModelFileError(path, f"no tokenizer ({str(error)[:120]})") from error


def check_tokenizer(path: Path, config: DecoderConfig) -> None:
    """Check that a tokenizer fits a model: each id has an embedding, each special id a token."""
    tokenizer = load_tokenizer(path)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = config.vocab_size
    outside = [
        (number, token)
        for token, number in ids.items()
        if number >= size and token not in _OTHER_MODALITIES
    ]
    if outside:
        number, token = min(outside)
        reason = (
            f"token {token[:40]!r} has the id {number}, and the model has embeddings for {size} "
            "(vocab_size in config.json): it is the tokenizer of another model"
        )
        raise ModelFileError(path, reason)
    for key, special in (
        ("bos_token_id", (config.bos_token_id,)),
        ("eos_token_id", config.eos_token_ids),
    ):
        for each in special:
            if tokenizer.id_to_token(each) is None:
                raise ModelFileError(path, f"it has no token {each}, the {key} of config.json")


def spread_windows(
    tokens: list[int], length: int, n_windows: int, bos_token_id: int
) -> list[list[int]]:
    """Cut up to `n_windows` windows of `length`, evenly spread, every second one led by bos.

    Prompts come with and without bos, whose activations can differ from all others.
    """
    n_windows = min(n_windows, max(1, len(tokens) // length))
    if n_windows < 1:
        raise BuildError("cannot calibrate: no windows were asked for")
    last = max(0, len(tokens) - length)
    starts = [last * index // max(1, n_windows - 1) for index in range(n_windows)]
    windows = [tokens[start : start + length] for start in starts]
    return [
        [bos_token_id, *window][:length] if index % 2 == 0 else window
        for index, window in enumerate(windows)
    ]
