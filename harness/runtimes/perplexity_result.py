"""The result file of `genie_perplexity.py`, checked against what was asked."""

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import RuntimeOutputError
from harness.results.records import Positions
from harness.runtimes.base import PerplexityResult, Window


class _WindowRecord(BaseModel):
    model_config = ConfigDict(extra="ignore")

    perplexity: float = Field(ge=1.0, allow_inf_nan=False)
    tokens: int = Field(ge=1)


class _Result(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: int = Field(ge=1, le=1)
    perplexity: float = Field(ge=1.0, allow_inf_nan=False)
    positions: Positions
    n_tokens: int = Field(ge=1)
    retries: int = Field(ge=0)
    windows: list[_WindowRecord]


def parse_perplexity(text: str, windows: Sequence[Window], device: str) -> PerplexityResult:
    """The result as numbers.

    Raises:
        RuntimeOutputError: no such file, or one about other windows than those that were sent.
    """
    try:
        result = _Result.model_validate_json(text)
    except ValidationError as error:
        reason = f"unreadable perplexity result: {error.errors()[0]['msg']}"
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
        positions=result.positions,
    )
