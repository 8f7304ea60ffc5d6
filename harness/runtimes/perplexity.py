"""Text windows for Genie's perplexity, and the result of scoring them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from buildlib.validation import first_fault
from harness.errors import RuntimeOutputError, WrongUseError
from harness.results.records import Positions
from harness.runtimes.base import PerplexityResult, Window
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.tokenizer import encode, load_tokenizer

_SLACK = 8
_LARGEST = 1e300


def cut_windows(
    text: str, tokenizer: Path, limit: ContextLimit, most: int | None = None
) -> list[Window]:
    """Cut a text; what fills no window at its end is left out.

    Args:
        most: at most that many windows, from the start of the text.

    Raises:
        WrongUseError: the text is shorter than one window, or the tokenizer cannot be read.
    """
    context = limit.context_length
    encoder = load_tokenizer(tokenizer)
    text = text.replace("\0", " ")
    offsets = encoder.encode(text, add_special_tokens=False).offsets
    windows: list[Window] = []
    start = 0
    while (most is None or len(windows) < most) and start + context + _SLACK <= len(offsets):
        piece = text[offsets[start][0] : offsets[start + context + _SLACK - 1][1]]
        ids = encode(encoder, piece)
        if not context - 1 <= len(ids) <= 2 * context - 2:
            raise WrongUseError(
                f"the text cannot be cut into windows of {context} tokens near {piece[:40]!r}"
            )
        windows.append(Window(piece, tuple(ids[: limit.past_tokens])))
        start += limit.past_tokens
    if not windows:
        raise WrongUseError(
            f"the text has {len(offsets)} tokens, and one window of the context length needs "
            f"{context + _SLACK}: name a longer text"
        )
    return windows


class _WindowRecord(BaseModel):
    model_config = ConfigDict(extra="ignore")

    perplexity: float = Field(ge=1.0, le=_LARGEST)
    tokens: int = Field(ge=1)


class _Result(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: int = Field(ge=1, le=1)
    perplexity: float = Field(ge=1.0, le=_LARGEST)
    positions: Literal["first_cl_minus_ar"]
    n_tokens: int = Field(ge=1)
    retries: int = Field(ge=0)
    windows: Annotated[list[_WindowRecord], FailFast()]


def parse_perplexity(
    text: str, windows: Sequence[Window], device: str, positions: Positions = "first_cl_minus_ar"
) -> PerplexityResult:
    """Return the result as numbers.

    Args:
        positions: that the windows were cut for.

    Raises:
        RuntimeOutputError: no such file, or one about other windows than those that were sent.
    """
    try:
        result = _Result.model_validate_json(text)
    except ValidationError as error:
        reason = f"unreadable perplexity result: {first_fault(error, _Result)}"
        raise RuntimeOutputError(device, reason, text[-500:]) from error
    scored = sum(len(window.scored) for window in windows)
    if len(result.windows) != len(windows) or result.n_tokens != scored:
        done, asked = f"{len(result.windows)} windows", f"{len(windows)} windows"
        reason = f"scored {done} with {result.n_tokens} tokens, not {asked} with {scored}"
        raise RuntimeOutputError(device, reason, text[-500:])
    combined = math.exp(
        sum(
            math.log(done.perplexity) * len(sent.scored)
            for done, sent in zip(result.windows, windows, strict=True)
        )
        / scored
    )
    return PerplexityResult(
        perplexity=combined,
        windows=tuple(window.perplexity for window in result.windows),
        tokens=scored,
        retries=result.retries,
        positions=positions,
    )
