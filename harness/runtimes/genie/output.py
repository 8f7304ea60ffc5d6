"""Output of Genie's runners: the answer, the profile, the clock, a trace, a perplexity and logits.

A profile is the JSON that `genie-t2t-run --profile` writes. Each event holds its figures as
`{"value": ..., "unit": ...}`. The unit in the file decides, never the name: figures without a known
unit are refused. Unknown events and keys are skipped, since releases add them. Layout: "Genie
Profile", docs.qualcomm.com 80-63442-10; the figures' names were read from files that Genie 1.21
wrote.
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from buildlib.container.genie_config import GenieConfig
from buildlib.validation import first_fault
from harness.devices.device import Device
from harness.errors import RuntimeOutputError
from harness.results.derived import find_tails
from harness.results.records import Positions
from harness.runtimes.base import EarlyEnd, PerplexityResult, StepLogits, StepWindow, Window
from harness.runtimes.deployed import RunFolder, runner_command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BEGIN = "[BEGIN]: "
_END = "[END]"
IDS = re.compile(r"[0-9 ]*")
"""Token ids as runners print them."""
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
    gaps = REQUIRED - metrics.keys()
    if gaps:
        reason = f"the Genie profile lacks {', '.join(sorted(gaps))}"
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
        began_s: when the query began, in seconds since the process did; None of older runners.
        pieces: when each token came, in seconds since the query began.
    """

    model_config = ConfigDict(extra="ignore")

    format: int = Field(ge=1, le=1)
    init_s: float = Field(ge=0, le=86_400)
    began_s: float | None = Field(default=None, ge=0, le=86_400)
    status: int
    pieces: Annotated[list[Annotated[float, Field(ge=0, le=86_400)]], FailFast()]

    @property
    def tails(self) -> dict[str, float]:
        """Percentiles of the times between tokens."""
        return find_tails("itl", [b - a for a, b in pairwise(self.pieces)])

    def metrics(self, prompt_tokens: int) -> dict[str, float]:
        """Return the profile's metrics, measured from outside.

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
    if generated > count or (count == 0 and clock.status == 0):  # an end at once counts as none
        cause = "an end-of-sequence token" + (" or a stop sequence" if stops else "")
        return EarlyEnd(count, asked, f"{cause} ended it")
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


def generated_text(output: str, device: str) -> str:
    """Return the generated text between the marks.

    The prompt is echoed before the first mark and the model's text may itself hold marks, so the
    text runs from the first mark at the start of a line to the last end mark.
    """
    start = output.rfind("\n" + _BEGIN)
    end = output.rfind(_END)
    if start < 0 or end < start:
        raise RuntimeOutputError(device, "the runner printed no [BEGIN]: ... [END]")
    return output[start + 1 + len(_BEGIN) : end]


def parse_ids(printed: str, config: GenieConfig, device: str) -> tuple[int, ...]:
    """Return the token ids that a runner printed."""
    if not IDS.fullmatch(printed):
        reason = "the runner printed something else than token ids"
        raise RuntimeOutputError(device, reason)
    ids = tuple(int(word) for word in printed.split() if len(word) < 10)
    size = config.dialog.context.n_vocab
    if any(token >= size for token in ids):
        reason = f"the runner printed token {max(ids)}, outside the vocabulary of {size}"
        raise RuntimeOutputError(device, reason)
    return ids


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
    """Return the result as numbers."""
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


STEP_RUNNER: Final = "genie_logits.py"
STEP_SAMPLER: Final = "qnnfarm-steps"
"""Name under which the runner registers its sampler."""
_CONFIG, _WINDOWS, _OUTPUT, _SUMMARY, _TRACE = (
    "query_config.json", "steps.json", "logits.raw", "steps_done.json", "trace.json",
)  # fmt: skip
_FLOAT_BYTES = 4


class _Summary(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: Annotated[int, Field(ge=1, le=1)]
    step_bytes: Annotated[int, Field(ge=_FLOAT_BYTES, le=1 << 30, multiple_of=_FLOAT_BYTES)]
    steps: list[int]


@dataclass(frozen=True)
class StepRun:
    """Decodes windows in a run folder.

    Attributes:
        timeout_s: for one window.
        logging: options of the runner for Genie's own log.
        trace: whether the runner writes a trace.
        command: that starts the runner, its file last.
    """

    device: Device
    folder: RunFolder
    timeout_s: float
    logging: tuple[str, ...] = ()
    trace: bool = False
    command: tuple[str, ...] = runner_command(STEP_RUNNER)

    def decode(self, windows: Sequence[StepWindow], config: GenieConfig) -> StepLogits:
        """Return the logits of each window."""
        content = json.dumps([asdict(window) for window in windows])
        self.folder.send({_CONFIG: config.to_json(), _WINDOWS: content})
        command = [*self.command, "-c", _CONFIG, "--windows", _WINDOWS, *self.logging]
        command += ["--output_file", _OUTPUT, "--summary", _SUMMARY]
        command += ["--trace", _TRACE] if self.trace else []
        timeout_s = self.timeout_s * len(windows)
        self.folder.run(command, name=self.command[-1], timeout_s=timeout_s, stdout="output.txt")
        text = self.folder.read(_SUMMARY)
        try:
            summary = _Summary.model_validate_json(text)
        except ValidationError as error:
            raise self._odd(f"unreadable summary: {first_fault(error, _Summary)}") from error
        counts = [len(window.following) for window in windows]
        if summary.steps != counts:
            raise self._odd(f"steps {summary.steps}, not {counts}")
        logits = self._read(counts, summary.step_bytes)
        traced = parse_trace(self.folder.read(_TRACE), self.device.serial) if self.trace else ""
        return StepLogits(logits, traced)

    def _read(self, steps: Sequence[int], step_bytes: int) -> "list[npt.NDArray[np.float32]]":
        import numpy as np

        data = self.folder.pull(_OUTPUT, sum(steps) * step_bytes)
        if len(data) != sum(steps) * step_bytes:
            raise self._odd(f"{len(data)} bytes of logits for {sum(steps)} steps")
        values = np.frombuffer(data, "<f4").astype(np.float32)
        rows = values.reshape(sum(steps), step_bytes // _FLOAT_BYTES)
        ends = np.cumsum(steps)[:-1]
        return list(np.split(rows, ends))

    def _odd(self, reason: str) -> RuntimeOutputError:
        return RuntimeOutputError(self.device.serial, f"{self.command[-1]}: {reason}")
