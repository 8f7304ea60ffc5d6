"""Tokenizer of a checkpoint, and the windows of tokens that calibration reads."""

from pathlib import Path

from tokenizers import Tokenizer

from buildlib.errors import CalibrationError, CheckpointError

DEFAULT_WINDOWS = 8


def text_windows(
    tokenizer: Path,
    text: str,
    length: int,
    bos_token_id: int,
    n_windows: int = DEFAULT_WINDOWS,
) -> list[list[int]]:
    """Cut windows of tokens from all over a text, as `spread_windows` does.

    Raises:
        CheckpointError: there is no tokenizer to read.
    """
    tokens = load_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids
    return spread_windows(tokens, length, n_windows, bos_token_id)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Raises:
        CheckpointError: missing, or not what `tokenizers` reads.
    """
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from error
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(path, f"no tokenizer ({str(error)[:120]})") from error


def spread_windows(
    tokens: list[int], length: int, n_windows: int, bos_token_id: int
) -> list[list[int]]:
    """Cut up to `n_windows` windows of `length`, evenly spread, every second one led by bos.

    Prompts come with and without bos, whose activations can differ from all others.
    """
    n_windows = min(n_windows, max(1, len(tokens) // length))
    if n_windows < 1:
        raise CalibrationError("no windows were asked for")
    last = max(0, len(tokens) - length)
    starts = [last * index // max(1, n_windows - 1) for index in range(n_windows)]
    windows = [tokens[start : start + length] for start in starts]
    return [
        [bos_token_id, *window][:length] if index % 2 == 0 else window
        for index, window in enumerate(windows)
    ]
