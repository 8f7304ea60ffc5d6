"""Windows of a text that are scored one by one, each from an empty context."""

from pathlib import Path

from harness.errors import WrongUseError
from harness.runtimes.base import Window
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.tokenizer import encode, load_tokenizer

_SLACK = 8


def cut_windows(
    text: str, tokenizer: Path, limit: ContextLimit, most: int | None = None, *, bos: bool = True
) -> list[Window]:
    """Cut a text; an end that fills no window is left out.

    Genie 1.21 scores the first CL - AR predictions of a context that bos and the window fill. So
    without bos the window has a token more, of which the first is predicted by nothing: it is the
    last one that the window before scores.

    Args:
        bos: whether it stands before each window.

    Raises:
        WrongUseError: the text is shorter than one window, or the tokenizer cannot be read.
    """
    context = limit.context_length
    encoder = load_tokenizer(tokenizer)
    text = text.replace("\0", " ")
    offsets = encoder.encode(text, add_special_tokens=False).offsets
    windows: list[Window] = []
    first = 0 if bos else 1
    start = 0
    while (most is None or len(windows) < most) and start + context + _SLACK <= len(offsets):
        piece = text[offsets[start][0] : offsets[start + context + _SLACK - 1][1]]
        ids = encode(encoder, piece)
        if not context - 1 <= len(ids) - first <= 2 * context - 2:
            raise WrongUseError(
                f"the text cannot be cut into windows of {context} tokens near {piece[:40]!r}"
            )
        scored = tuple(ids[first : first + limit.past_tokens])
        windows.append(Window(piece, scored, context=tuple(ids[:first])))
        start += limit.past_tokens
    if not windows:
        raise WrongUseError(
            f"the text has {len(offsets)} tokens, and one window of the context length needs "
            f"{context + _SLACK}: name a longer text"
        )
    return windows
