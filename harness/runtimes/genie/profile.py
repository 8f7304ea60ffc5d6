"""Genie's profile JSON, as `genie-t2t-run --profile` writes it, to metrics.

Each event holds its figures as `{"value": ..., "unit": ...}`. The unit in the file decides, never
the name: figures without a known unit are refused. Unknown events and keys are skipped, since
releases add them. Layout: "Genie Profile", docs.qualcomm.com 80-63442-10; the figures' names were
read from files that Genie 1.21 wrote.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from buildlib.validation import first_fault
from harness.errors import RuntimeOutputError
from harness.runtimes.base import EarlyEnd

# figure in the profile -> our metric
_METRICS = {
    "init-time": "init_s",
    "num-prompt-tokens": "prompt_tokens",
    "prompt-processing-rate": "prefill_tokens_per_s",
    "time-to-first-token": "ttft_s",
    "num-generated-tokens": "generated_tokens",
    "token-generation-rate": "decode_tokens_per_s",
    "token-acceptance-rate": "token_acceptance_rate",
}
REQUIRED = frozenset(_METRICS.values()) - {"decode_tokens_per_s", "token_acceptance_rate"}
# unit in the profile -> factor to the unit of our metric (s, tokens, tokens/s)
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0} | dict.fromkeys(
    ("toks/sec", "tokens/s", "toks/iteration", ""), 1.0
)
_CONTEXT_EXCEEDED = 4  # GENIE_STATUS_WARNING_CONTEXT_EXCEEDED
_UNREADABLE = (
    AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def parse_profile(text: str, device: str) -> dict[str, float]:
    """Return the metrics of the last query in a profile."""
    return complete_figures(parse_figures(text, device), {}, device)


def parse_figures(text: str, device: str) -> dict[str, float]:
    """Return the metrics that a profile has; of a query that filled its context there are none."""
    try:
        events = [e for component in json.loads(text)["components"] for e in component["events"]]
        return {metric: value for event in events for metric, value in figures_of(event).items()}
    except _UNREADABLE as error:
        raise RuntimeOutputError(device, f"unreadable Genie profile: {error}") from error


def lacks_figures(figures: Mapping[str, float]) -> bool:
    """Return whether a profile has not told of its query: of one come all figures, or none."""
    return not figures.keys() >= REQUIRED


def complete_figures(
    figures: Mapping[str, float], clocked: Mapping[str, float], device: str
) -> dict[str, float]:
    """Complete the metrics of a profile.

    Args:
        clocked: stands in for all figures of a query that the profile lacks, by metric.
    """
    metrics = {**clocked, **figures}
    missing = REQUIRED - metrics.keys()
    if missing:
        reason = f"the Genie profile lacks {', '.join(sorted(missing))}"
        raise RuntimeOutputError(device, reason)
    if metrics["generated_tokens"] < 2:  # no token came after the first: there is no decode rate
        metrics.pop("decode_tokens_per_s", None)
    return metrics


def parse_trace(text: str, device: str) -> str:
    """Return a trace that a runner wrote, on one line."""
    try:
        document = json.loads(text)
        if not isinstance(document["traceEvents"], list):
            raise TypeError("it has no events")
        return json.dumps(document, separators=(",", ":"))
    except _UNREADABLE as error:
        raise RuntimeOutputError(device, f"unreadable trace: {error}") from error


class TokenTimes(BaseModel):
    """Record of a query by the runner's token callback.

    Attributes:
        status: that Genie returned.
        pieces: when each token came, in seconds since the query began.
    """

    model_config = ConfigDict(extra="ignore")

    format: int = Field(ge=1, le=1)
    init_s: float = Field(ge=0, le=86_400)
    status: int
    pieces: Annotated[list[Annotated[float, Field(ge=0, le=86_400)]], FailFast()]

    def metrics(self, prompt_tokens: int) -> dict[str, float]:
        """Return what the profile would say, measured from outside.

        A prefill ends with the first token.

        Args:
            prompt_tokens: with bos.
        """
        count = len(self.pieces)
        metrics = {
            "init_s": self.init_s,
            "prompt_tokens": float(prompt_tokens),
            "generated_tokens": float(count),
        }
        first, last = (self.pieces[0], self.pieces[-1]) if self.pieces else (0.0, 0.0)
        if first > 0:
            metrics |= {"ttft_s": first, "prefill_tokens_per_s": prompt_tokens / first}
        if last > first:
            metrics["decode_tokens_per_s"] = (count - 1) / (last - first)
        return metrics


def parse_clock(text: str, device: str) -> TokenTimes:
    """Read the file that a runner writes for `--clock`."""
    try:
        return TokenTimes.model_validate_json(text)
    except ValidationError as error:
        reason = f"unreadable clock of the runner: {first_fault(error, TokenTimes)}"
        raise RuntimeOutputError(device, reason) from error


def find_early_end(
    generated: float, asked: int, clock: TokenTimes | None, *, stops: bool = False
) -> EarlyEnd | None:
    """Say why a query gave fewer tokens than were asked for; None if it did not.

    Genie's profile counts the token or the sequence that ends an answer, and its callback does not
    get it: that is how an end of text shows.

    Args:
        generated: tokens by Genie's profile, or by the clock where it has no figures.
        clock: of the runner; None if it has none, as `genie-app` and the SDK's programs.
        stops: whether the dialog has stop sequences.
    """
    count = 1 if clock is None else len(clock.pieces)
    if max(generated, count) >= asked:  # of an answer of one token the profile counts none
        return None
    if clock is None:
        return EarlyEnd(int(generated), asked, "the runner does not say why")
    if clock.status == _CONTEXT_EXCEEDED:
        return EarlyEnd(count, asked, "the context is full")
    if generated > count:
        ended = "an end-of-sequence token" + (" or a stop sequence" if stops else "")
        return EarlyEnd(count, asked, f"{ended} ended it")
    return EarlyEnd(count, asked, None)


def figures_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that one event of a profile has, in our units.

    Raises:
        TypeError, ValueError: a figure without a known unit, or no number.
    """
    return {metric: _value(name, event[name]) for name, metric in _METRICS.items() if name in event}


def _value(name: str, figure: Any) -> float:  # noqa: ANN401  (raw JSON)
    if not isinstance(figure, Mapping):
        raise TypeError(f"{name} is {reprlib.repr(figure)}, without a unit")
    unit = figure.get("unit", "")
    value = figure["value"]
    if unit not in _UNITS or isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {reprlib.repr(value)} {reprlib.repr(unit)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}")
    return float(value) * _UNITS[unit]
