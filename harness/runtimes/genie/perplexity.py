"""Perplexities that `genie_perplexity.py` or `graph_run.py` wrote, read."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from buildlib.validation import first_fault
from harness.errors import RuntimeOutputError
from harness.results.records import Positions
from harness.runtimes.base import PerplexityResult, Window

_LARGEST = 1e300


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
    """
    try:
        result = _Result.model_validate_json(text)
    except ValidationError as error:
        reason = f"unreadable perplexity result: {first_fault(error, _Result)}"
        raise RuntimeOutputError(device, reason) from error
    scored = sum(len(window.scored) for window in windows)
    if len(result.windows) != len(windows) or result.n_tokens != scored:
        done, asked = f"{len(result.windows)} windows", f"{len(windows)} windows"
        reason = f"scored {done} with {result.n_tokens} tokens, not {asked} with {scored}"
        raise RuntimeOutputError(device, reason)
    perplexities = [window.perplexity for window in result.windows]
    return PerplexityResult.of(perplexities, windows, positions, retries=result.retries)
