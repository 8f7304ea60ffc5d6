"""Tokenizer of a checkpoint, and the windows of tokens that calibration reads.

What stands before a text is what transformers puts there: the tokens of the post-processor in
`tokenizer.json`. Where there is that file, transformers 5 reads neither `add_bos_token` of
`tokenizer_config.json` nor `bos_token_id` of `config.json` for it.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from buildlib.checkpoint.config import NO_BOS, DecoderConfig, load_config
from buildlib.checkpoint.generation import load_generation
from buildlib.checkpoint.layout import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE
from buildlib.errors import BuildError, ModelFileError, ModelWarning
from buildlib.files import atomic_write_bytes, check_file

DEFAULT_WINDOWS = 8
_OTHER_MODALITIES = {"<image_soft_token>"}
"""Tokens of text-only Gemma 3 that its embedding has no row for; no text has them."""


def text_windows(
    tokenizer: Path,
    text: str,
    length: int,
    bos: int | None,
    n_windows: int = DEFAULT_WINDOWS,
) -> list[list[int]]:
    """Cut windows of tokens from all over a text, as `spread_windows` does."""
    tokens = load_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids
    return spread_windows(tokens, length, n_windows, bos)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint as its file has it; `load_tokenizer` is to count by."""
    try:
        check_file(path)
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(path, error.strerror or "cannot be read") from error
    except Exception as error:  # the library raises bare Exceptions
        raise ModelFileError(path, f"no tokenizer ({str(error)[:120]})") from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint, without the truncation and padding that it may have."""
    tokenizer = read_tokenizer(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def describe_trimming(tokenizer: Tokenizer) -> str:
    """Say to which length a tokenizer cuts and fills texts, as its file says; empty for neither."""
    cut, fill = tokenizer.truncation, tokenizer.padding
    words = [f"cuts texts to {cut['max_length']} tokens"] if cut else []
    if fill:
        words.append(f"fills them to {fill['length'] or 'the longest'}")
    return " and ".join(words)


def untrimmed_file(path: Path) -> bytes:
    """Return a tokenizer file without truncation and padding; otherwise it is the file as it is."""
    content = path.read_bytes()
    if not describe_trimming(read_tokenizer(path)):
        return content
    values = json.loads(content) | {"truncation": None, "padding": None}
    return json.dumps(values, ensure_ascii=False).encode()


def tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before a text, and those after it."""
    encoding = tokenizer.encode("a")
    own = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
    if not own:
        return encoding.ids, []
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def words_around(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return what a tokenizer puts before a text and after it, such as `[CLS]` and `[SEP]`."""
    before, after = tokens_around(tokenizer)
    name = tokenizer.id_to_token
    return "".join(map(str, map(name, before))), "".join(map(str, map(name, after)))


def text_bos(path: Path) -> int | None:
    """Return the token that stands before a text; None if its tokenizer puts none there.

    Warns:
        ModelWarning: it puts several there. Genie puts at most one: it is the first.
    """
    tokenizer = load_tokenizer(path)
    before, _ = tokens_around(tokenizer)
    if len(before) > 1:
        words, _ = words_around(tokenizer)
        warnings.warn(
            f"{path}: {words} stand before a text, of which Genie can put the first there alone: "
            "texts begin without the others, unless a chat template writes them",
            ModelWarning,
            stacklevel=2,
        )
    return before[0] if before else None


def load_text_config(folder: Path) -> DecoderConfig:
    """Read the configuration of a user's model, with the bos that its tokenizer puts before texts.

    The folders that stages hand on have it in their `config.json`.
    """
    config, tokenizer = load_config(folder / CONFIG_FILE), folder / TOKENIZER_FILE
    return config.model_copy(update={"bos_token_id": text_bos(tokenizer)})


def write_configuration(config: bytes, tokenizer: Path, folder: Path) -> None:
    """Write `config.json` and `tokenizer.json` of a model as stages and containers read them.

    `bos_token_id` becomes the token that stands before a text, -1 if none does, and `eos_token_id`
    what `generation_config.json` beside the tokenizer has, which is copied. The tokenizer is the
    file itself, but without truncation and padding.
    """
    bos, values = text_bos(tokenizer), json.loads(config)
    stated = values | {"bos_token_id": NO_BOS if bos is None else bos}
    generation = tokenizer.with_name(GENERATION_FILE)
    if generation.is_file():
        ends = load_generation(tokenizer.parent).eos_token_ids
        _check_ends(load_tokenizer(tokenizer), ends, GENERATION_FILE, tokenizer)
        stated |= {"eos_token_id": list(ends)} if ends else {}
        atomic_write_bytes(folder / GENERATION_FILE, generation.read_bytes())
    if stated != values:
        config = json.dumps(stated, indent=2).encode()
    atomic_write_bytes(folder / CONFIG_FILE, config)
    atomic_write_bytes(folder / TOKENIZER_FILE, untrimmed_file(tokenizer))


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
    _check_ends(tokenizer, config.eos_token_ids, CONFIG_FILE, path)


def _check_ends(tokenizer: Tokenizer, ends: Sequence[int], file: str, path: Path) -> None:
    for each in ends:
        if tokenizer.id_to_token(each) is None:
            raise ModelFileError(path, f"it has no token {each}, the eos_token_id of {file}")


def spread_windows(
    tokens: list[int], length: int, n_windows: int, bos: int | None
) -> list[list[int]]:
    """Cut up to `n_windows` windows of `length`, evenly spread, each led by bos if texts are."""
    n_windows = min(n_windows, max(1, len(tokens) // length))
    if n_windows < 1:
        raise BuildError("cannot calibrate: no windows were asked for")
    last = max(0, len(tokens) - length)
    starts = [last * index // max(1, n_windows - 1) for index in range(n_windows)]
    lead = [] if bos is None else [bos]
    return [[*lead, *tokens[start : start + length]][:length] for start in starts]
