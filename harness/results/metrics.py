"""Metrics: their registry, measurements of them, and the mean and spread of these.

A metric's key names its unit, so that a bare number in a query or a JSON file cannot be misread.
Keys that are not registered are refused: a misspelt metric would otherwise be a silent gap in every
report. A metric is one declaration, from which follow its place in tables, what judges it, and its
line in docs/measurements.md (`python -m tools.commands` writes that).

Mean and spread have no other definition: reports, grades, comparisons, the command line and the
pytest plugin take theirs from here. Repetitions of one run share a session: the same process start,
temperature and clock. Spread between sessions is often far larger than within one, so with several
sessions the session is the unit of sampling: the mean is the mean of the sessions' means, and the
standard deviation is theirs.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, StrEnum, auto
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from harness.errors import MetricError

MAX_COUNT = 2**31 - 1
"""PostgreSQL's INTEGER has no more."""
SPREAD_LIMIT = 0.10
"""Standard deviation over mean from which a result is called unstable; pyperf's limit."""
EXTREME_LIMIT = 0.50
"""Distance of the smallest or largest value from the mean, over the mean; pyperf's limit."""
FIRST_LIMIT = 0.10
"""Distance of the first repetition from the median of the others, over that median."""
MIN_FREEDOM = 2
"""Sessions more than devices, from which these can be told apart."""
MIN_REPETITIONS = 3
"""Fewer repetitions say almost nothing about spread."""
_MIB = 2.0**20
_DAY_S = 86_400.0
_MAX_BYTES = 2.0**50
_MAX_TOKENS = 2.0**31


class Direction(StrEnum):
    """The direction in which a metric gets better."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


_HIGHER, _LOWER, _NEITHER = Direction


class Use(Flag):
    """Use of a metric, beyond being stored.

    Attributes:
        LEADING: a rate of the model: warm-up, stability and the present state go by these, and
            comparisons unless told otherwise.
        COMPARED: a speed, latency or cost of the runtime, which `compare` can judge.
        GATED: judged by a gate unless told otherwise.
        JUDGED: histories and alerts look for its changes.
        SPEED, STEP, TASK: a column of a report's summary, of its decode steps, of its tasks.
        EXPECTED: of a model that generates text, so that a gap in its column says something.
        BRIEF: part of a result in one line.
        SESSION: one value for all repetitions of a session.
        EXACT: without noise: what a container gives over the same tokens, it gives again.
    """

    LEADING = auto()
    COMPARED = auto()
    GATED = auto()
    JUDGED = auto()
    SPEED = auto()
    STEP = auto()
    TASK = auto()
    EXPECTED = auto()
    BRIEF = auto()
    SESSION = auto()
    EXACT = auto()


_NO_USE = Use(0)
_COMPARED = Use.SPEED | Use.COMPARED | Use.JUDGED
_EXPECTED = Use.EXPECTED | _COMPARED
_GATED = Use.SPEED | Use.GATED | Use.JUDGED
_BRIEF_TASK = Use.TASK | Use.BRIEF


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, and how its values are shown.

    Attributes:
        key: its name in the store, with the unit: `ttft_s`.
        about: what it is, in Markdown.
        short: the label where space is scarce.
        rank: columns that a narrow terminal leaves out, the highest first; 0 always stays.
        unit: the unit of stored values.
        shown_unit: the unit of values as people read them, `shown = stored * scale`; empty for pure
            numbers.
        decimals: of values below 100; larger ones are shown with fewer.
        positive: whether 0 is refused: a rate of 0 tokens/s is a failure, not a speed.
        integral: whether only whole numbers are legal.
    """

    key: str
    label: str
    about: str
    use: Use = _NO_USE
    unit: str = ""
    direction: Direction = _NEITHER
    shown_unit: str = ""
    decimals: int = 2
    short: str = ""
    rank: int = 0
    scale: float = 1.0
    minimum: float = 0.0
    maximum: float = math.inf
    positive: bool = False
    integral: bool = False

    def check(self, value: float) -> float:
        """Return the value if it is legal."""
        legal = (
            math.isfinite(value)
            and self.minimum <= value <= self.maximum
            and not (self.positive and value == 0)
            and not (self.integral and value != int(value))
        )
        if not legal:
            raise MetricError(f"{self.key} cannot be {value:g}: legal is {self.legal_range}")
        return float(value)

    def gain(self, ratio: float) -> float:
        """Return a change for the better as a part of the value before; below 0 for the worse.

        Args:
            ratio: now over before.
        """
        return ratio - 1 if self.direction is Direction.HIGHER else 1 - ratio

    @property
    def name(self) -> str:
        """The key without its unit: `ttft`, `decode`."""
        return self.key.removesuffix("_" + self.unit.lower().replace("/", "_per_"))

    @property
    def heading(self) -> tuple[str, str]:
        """The two lines above a column: the label and its unit, or what the label says after it."""
        first, _, rest = self.label.replace(",", "").partition(" ")
        return (self.label, self.shown_unit) if self.shown_unit else (first, rest)

    @property
    def legal_range(self) -> str:
        """The legal values in words."""
        kind = "a whole number" if self.integral else "a number"
        low = "above 0" if self.positive and self.minimum == 0 else f"from {self.minimum:g}"
        return f"{kind} {low} to {self.maximum:g} ({self.unit})"

    def format(self, value: float, *, beside: float | None = None) -> str:
        """Format a value in `shown_unit`, without naming the unit: for cells whose heading does.

        Args:
            value: in `unit`.
            beside: the value that sets the number of decimals, for a deviation beside its mean.
        """
        size = abs((value if beside is None else beside) * self.scale)
        decimals = self.decimals - (size >= 100) - (size >= 1000)
        return f"{value * self.scale:,.{max(decimals, 0)}f}"

    def show(self, value: float) -> str:
        """Format a value with its unit: `17.2 tokens/s`, `1 token`, `2 tokens`."""
        one = value == 1 and self.integral and self.shown_unit == self.unit
        unit = self.shown_unit.removesuffix("s") if one else self.shown_unit
        return f"{self.format(value)} {unit}".rstrip()


def unknown_metric(key: str, known: Iterable[str]) -> MetricError:
    """Return the error of a key that is not registered."""
    return MetricError(f"unknown metric {key!r}: known are {', '.join(known)}")


def find_metric(key: str) -> Metric:
    """Look up a metric by its key.

    Raises:
        MetricError: no metric has this key.
    """
    try:
        return METRICS[key]
    except KeyError:
        raise unknown_metric(key, METRICS) from None


def find_key(text: str, known: Collection[str] | None = None) -> str:
    """Find the key of a metric by its name or its beginning: `decode` is `decode_tokens_per_s`.

    Args:
        known: the keys among which it is; by default all.

    Raises:
        MetricError: none or several begin so.
    """
    keys = METRICS if known is None else known
    matches = [key for key in keys if text and key.startswith(text)]
    if text in keys:
        return text
    matches = [key for key in matches if METRICS[key].name == text] or matches
    if len(matches) != 1:
        raise unknown_metric(text, matches or keys)
    return matches[0]


_rate = partial(
    Metric, unit="tokens/s", direction=_HIGHER, shown_unit="tokens/s", maximum=1e7, positive=True
)
_seconds = partial(Metric, unit="s", direction=_LOWER, shown_unit="s", decimals=3, maximum=_DAY_S)
_milliseconds = partial(_seconds, shown_unit="ms", scale=1000.0, decimals=1, positive=True)
_bytes = partial(
    Metric, unit="bytes", direction=_LOWER, shown_unit="MiB", scale=1 / _MIB, decimals=1,
    maximum=_MAX_BYTES, integral=True,
)  # fmt: skip
_energy = partial(
    Metric, use=_COMPARED | _GATED, unit="J/token", direction=_LOWER, shown_unit="mJ/token",
    scale=1000.0, decimals=1, maximum=1e6, positive=True, rank=8,
)  # fmt: skip
_share = partial(Metric, direction=_HIGHER, shown_unit="%", scale=100.0, decimals=1, maximum=1.0)
# exp of a mean negative log-likelihood, which is never below 0.
_perplexity = partial(Metric, direction=_LOWER, decimals=3, minimum=1.0, maximum=1e12)


def _count(key: str, label: str, about: str) -> Metric:
    unit = key.rpartition("_")[2]
    return Metric(
        key, label, about, unit=unit, shown_unit=unit, decimals=0,
        maximum=_MAX_TOKENS, integral=True,
    )  # fmt: skip


def _with_error(metric: Metric, by: str = "") -> tuple[Metric, Metric]:
    """Return a metric and its standard error."""
    label = f"Standard error of {metric.label[0].lower()}{metric.label[1:]}"
    about = f"its standard error{by}"
    return metric, replace(
        metric, key=f"{metric.key}_error", label=label, about=about, use=_NO_USE,
        direction=_NEITHER, rank=0, positive=False,
    )  # fmt: skip


def _shares(
    key: str, label: str, about: str, use: Use = Use.TASK, by: str = ""
) -> tuple[Metric, Metric]:
    return _with_error(_share(key, label, about, use), by)


_LEADING = Use.LEADING | Use.GATED | Use.BRIEF | _EXPECTED
_BY_PROMPTS = ", by resampling prompts"
_DECLARED = (
    _rate("prefill_tokens_per_s", "Prefill", "`prompt-processing-rate` of Genie's profile",
        _LEADING),
    _rate("decode_tokens_per_s", "Decode", "`token-generation-rate`; absent when no token came "
        "after the first", _LEADING),
    _milliseconds("ttft_s", "Time to first token", "`time-to-first-token`; shown in ms",
        _EXPECTED | Use.BRIEF, short="TTFT", rank=2),
    _milliseconds("itl_p50_s", "Between tokens, median", "inter-token latency: time from one token "
        "to the next by the runner's token callback, the median of a repetition of 21 tokens or "
        "more; those of a speculating dialog come in bursts", positive=False),
    _milliseconds("itl_p95_s", "Between tokens, p95", "its 95th percentile", _COMPARED,
        short="ITL p95", rank=8, positive=False),
    _milliseconds("itl_p99_s", "Between tokens, p99", "its 99th percentile, of 101 tokens or more",
        _COMPARED, short="ITL p99", rank=8, positive=False),
    _milliseconds("ttft_p50_s", "TTFT, median", "of the measured repetitions of a session, of 20 "
        "or more", Use.SESSION),
    _milliseconds("ttft_p95_s", "TTFT, p95", "their 95th percentile", _COMPARED | Use.SESSION,
        rank=8),
    _milliseconds("ttft_p99_s", "TTFT, p99", "their 99th percentile, of 100 or more",
        _COMPARED | Use.SESSION, rank=8),
    _rate("total_tokens_per_s", "Prompt and answer",
        "of prompt and answer together (llama-bench's `-pg`)"),
    _seconds("init_s", "Init", "`init-time`: creating the dialog, in a fresh process each "
        "repetition", _EXPECTED, rank=5),
    _seconds("first_load_s", "First load", "first load of a model on a device; of imported runs"),
    Metric("token_acceptance_rate", "Tokens accepted per call",
        "`token-acceptance-rate`, of `spd`, `ssd-q1` and `eaglet` dialogs: tokens that a call of "
        "the target gives on average", Use.SPEED, direction=_HIGHER, maximum=1e4,
        short="Accepted"),
    _milliseconds("embed_s", "Embedding", "one text through a text encoder; shown in ms "
        "([embeddings.md](../plugins/encoders/embeddings.md))", _GATED | Use.BRIEF),
    _milliseconds("inference_s", "Inference", "one call of a model; of imported runs",
        _GATED | Use.BRIEF, decimals=2),
    Metric("cosine_float", "Cosine with float", "of an embedding on the device with that of the "
        "model in float on the host; 1 is the same direction", Use.SPEED | Use.BRIEF,
        direction=_HIGHER, decimals=4, short="Cosine", minimum=-1.0, maximum=1.0),
    _seconds("elapsed_s", "Elapsed", "a duration on the host's clock; no command measures it, "
        "tests use it with `record_measurement`"),
    _count("prompt_tokens", "Prompt", "with the bos that Genie puts before every first prompt; "
        "`bench -p 64` sends 63 tokens of its own"),
    _count("generated_tokens", "Generated",
        "with the end-of-sequence token, if one ended the text"),
    _count("differing_texts", "Texts unlike plain decoding's",
        "texts of a speculating dialog that differ from plain decoding's"),
    _bytes("peak_rss_bytes", "Peak memory", "highest `VmHWM` of the largest process of the run, "
        "with the page cache of its mapped files, such as the container: it is lower after the "
        "cache was dropped; allocations in its last 0.2 s can be missed; absent if the run was "
        "sampled too seldom", _EXPECTED, short="Memory", rank=6, positive=True),
    _bytes("peak_anonymous_bytes", "Peak anonymous memory", "the part of it that belongs to the "
        "process alone, whatever the page cache holds: highest `Anonymous` + `Swap` of "
        "`/proc/PID/smaps_rollup`, read five times in the first second and then every second; "
        "the one to compare", _EXPECTED, short="Anonymous", rank=7, positive=True),
    _bytes("peak_file_bytes", "Peak file pages", "the other part: highest `Rss` - `Anonymous`, "
        "pages of mapped files and of shared memory", positive=True),
    _bytes("inference_peak_bytes", "Peak memory of inference",
        "peak memory of a call, by the tool's own measure; of imported runs", Use.JUDGED),
    *_with_error(_energy("prefill_energy_j_per_token", "Prefill energy", "energy of the whole "
        "phone from its battery for each token of the prompt, see "
        "[telemetry.md](telemetry.md#energy)")),
    *_with_error(_energy("decode_energy_j_per_token", "Decode energy",
        "likewise, for each token after the first")),
    _perplexity("perplexity", "Perplexity on device", "on the device, see below",
        Use.GATED | Use.JUDGED | Use.BRIEF | Use.EXACT, short="Perplexity\non device", rank=1),
    Metric("perplexity_error", "Standard error of perplexity",
        "its standard error, of two windows or more", decimals=3, maximum=1e15),
    _perplexity("perplexity_float", "Perplexity, float on host",
        "of the model in float on the host, over the same tokens", short="in float\non host",
        rank=4),
    _perplexity("perplexity_quantized_cpu", "Perplexity, quantized on CPU",
        "of the quantized model on the host's CPU, over the same tokens"),
    Metric("kl_divergence", "KL divergence from float", "of decode steps: D(float ‖ device), the "
        "mean over the steps ([quality.md](quality.md#is-it-the-same-model))", Use.STEP | Use.BRIEF,
        unit="nats", direction=_LOWER, shown_unit="nats", decimals=5, maximum=1e6),
    _share("top1_agreement", "Same most probable token as float",
        "part of the decode steps whose most probable token is that of float; shown in %",
        Use.STEP | Use.BRIEF, decimals=2),
    *_shares("accuracy", "Accuracy", "of a [task](../plugins/evaluation/evaluation.md): "
        "part of the questions whose likeliest choice is right; shown in %, as the others of tasks",
        _BRIEF_TASK | Use.JUDGED, by=", of two questions or more"),
    *_shares("accuracy_norm", "Accuracy by byte", "part of the questions whose likeliest choice "
        "by byte is right", _BRIEF_TASK),
    _share("accuracy_float", "Accuracy, float on host",
        "of the model in float on the host, on the same questions", Use.TASK),
    _share("accuracy_norm_float", "Accuracy by byte, float on host", "likewise, by byte",
        Use.TASK),
    _share("choice_agreement", "Same choice as float", "part of the questions in which device "
        "and float find the same choice likeliest", Use.TASK),
    *_shares("prompts_strict", "Prompts followed", "part of a task's prompts of which the answer "
        "follows every instruction", _BRIEF_TASK | Use.JUDGED),
    *_shares("prompts_loose", "Prompts followed, loosely", "the same, where first and last lines "
        "and asterisks do not count", _BRIEF_TASK),
    *_shares("instructions_strict", "Instructions followed", "part of the instructions of all "
        "prompts that answers follow", by=_BY_PROMPTS),
    *_shares("instructions_loose", "Instructions followed, loosely",
        "the same, where first and last lines and asterisks do not count", by=_BY_PROMPTS),
    _seconds("push_s", "Push", "deployment of a session, from the first hash on the host to the "
        "finished run folder"),
    _bytes("push_bytes", "Pushed", "bytes that deployment sent"),
    _bytes("reused_bytes", "Already on the device", "bytes that the device held already"),
    _count("push_files", "Files pushed", "files that deployment sent; like `elapsed_s`, for a "
        "test's own use"),
    _count("reused_files", "Files already on the device",
        "files that the device held already; likewise"),
)  # fmt: skip
METRICS: Mapping[str, Metric] = MappingProxyType({metric.key: metric for metric in _DECLARED})
"""Every metric by its key, in the order in which reports show them."""


def keys_of(use: Use) -> tuple[str, ...]:
    """Return the keys of the metrics that have a use."""
    return tuple(key for key, metric in METRICS.items() if use in metric.use)


LEADING_METRICS = keys_of(Use.LEADING)
COMPARABLE_METRICS = keys_of(Use.COMPARED)
GATE_METRICS = keys_of(Use.GATED)
JUDGED_METRICS = keys_of(Use.JUDGED)
SPEED_METRICS = keys_of(Use.SPEED)
STEP_METRICS = keys_of(Use.STEP)
TASK_METRICS = keys_of(Use.TASK)
BRIEF_METRICS = keys_of(Use.BRIEF)


class Measurement(BaseModel, frozen=True, extra="forbid"):
    """One value of one metric in one repetition.

    Attributes:
        metric: a key of `METRICS`.
        value: in the unit of the metric.
        repetition: from 0, counted apart for warm-ups and for measured repetitions.
        source: `token_callback` if the clock of the runner's callback gave it, because the
            runtime's own record lacks it; None: the usual source of the metric.

    Raises:
        MetricError: the metric is not registered, or cannot have the value.
    """

    metric: str
    value: Annotated[float, Field(strict=True)]
    repetition: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    is_warmup: bool = False
    source: Literal["token_callback"] | None = None

    @model_validator(mode="after")
    def _is_legal(self) -> "Measurement":
        find_metric(self.metric).check(self.value)
        return self


@dataclass(frozen=True, slots=True)
class Stats:
    """Measured repetitions of one metric in one or several sessions.

    Attributes:
        n: repetitions in all sessions, warm-ups not counted.
        sd: sample standard deviation of repetitions, or of session means if there are several
            sessions, of several devices around each one's own mean; None for a single value.
        median: of all repetitions, as are `minimum` and `maximum`.
    """

    n: int
    sessions: int
    mean: float
    sd: float | None
    median: float
    minimum: float
    maximum: float

    @property
    def units(self) -> int:
        """Number of what `sd` is of: sessions, or the repetitions of a single one."""
        return self.sessions if self.sessions > 1 else self.n

    @property
    def cv(self) -> float | None:
        """Coefficient of variation: standard deviation over mean."""
        return None if self.sd is None or self.mean == 0 else self.sd / abs(self.mean)

    def show(self, metric: Metric) -> str:
        """Format as `mean ± sd` in the metric's shown unit, without naming it."""
        mean, spread = metric.format(self.mean), self.show_spread(metric)
        return f"{mean} ± {spread}" if spread else mean

    def show_spread(self, metric: Metric) -> str:
        """Format the standard deviation; empty for a single value, whose spread is unknown."""
        return "" if self.sd is None else metric.format(self.sd, beside=self.mean)


def session_means(sessions: Sequence[Sequence[float]]) -> list[float]:
    """Compute the mean of each session that has repetitions."""
    return [statistics.fmean(values) for values in sessions if values]


def align_devices(
    sessions: Sequence[Sequence[float]], devices: Sequence[str]
) -> tuple[list[list[float]], int]:
    """Take the differences between devices out of sessions, each of which has repetitions.

    Without devices, or with too few sessions to tell these apart, there are none.

    Returns:
        the sessions at one level, and the degrees of freedom of their spread.
    """
    means, freedom = session_means(sessions), len(sessions) - max(len(set(devices)), 1)
    if not devices or freedom < MIN_FREEDOM or not all(means):
        return [list(values) for values in sessions], len(sessions) - 1
    own = {
        one: statistics.fmean(
            mean for mean, device in zip(means, devices, strict=True) if device == one
        )
        for one in devices
    }
    level = statistics.fmean(means)
    return [
        [value * level / own[device] for value in values]
        for values, device in zip(sessions, devices, strict=True)
    ], freedom


def summarise(sessions: Sequence[Sequence[float]], devices: Sequence[str] = ()) -> Stats | None:
    """Compute the statistics of sessions; None if no session has a repetition.

    Args:
        devices: of each session.
    """
    devices = [one for one, values in zip(devices, sessions, strict=False) if values]
    with_values = [values for values in sessions if values]
    everything = [value for values in with_values for value in values]
    if not everything:
        return None
    units = session_means(with_values) if len(with_values) > 1 else everything
    return Stats(
        n=len(everything),
        sessions=len(with_values),
        mean=statistics.fmean(units),
        sd=_spread_of(with_values, devices) if len(units) > 1 else None,
        median=statistics.median(everything),
        minimum=min(everything),
        maximum=max(everything),
    )


def _spread_of(sessions: Sequence[Sequence[float]], devices: Sequence[str]) -> float:
    """Return the standard deviation of several sessions, or of the repetitions of one."""
    if len(sessions) == 1:
        return statistics.stdev(sessions[0])
    alike, freedom = align_devices(sessions, devices)
    return statistics.pstdev(session_means(alike)) * math.sqrt(len(alike) / freedom)


def remark_on(
    sessions: Sequence[Sequence[float]], devices: Sequence[str] = (), *, on_spread: bool = True
) -> tuple[str, ...]:
    """List the reasons not to trust the numbers, in words.

    Args:
        devices: of each session.
        on_spread: also those of their spread; no on the emulator, where speeds mean nothing.
    """
    stats = summarise(sessions, devices)
    if stats is None:
        return ("only warm-ups, no measured repetition",)
    if stats.n == 1:
        return ("one repetition only, so its spread is unknown",)
    result = []
    if stats.n < MIN_REPETITIONS:
        result.append(f"{stats.n} repetitions only")
    if stats.mean > 0 and on_spread:
        result += _spread(stats)
        result += _first(sessions)
    return tuple(result)


def _spread(stats: Stats) -> list[str]:
    result = []
    if stats.cv is not None and stats.cv >= SPREAD_LIMIT:
        between = " between sessions" if stats.sessions > 1 else ""
        result.append(f"the standard deviation{between} is {stats.cv:.0%} of the mean")
    above = stats.maximum / stats.mean - 1
    below = 1 - stats.minimum / stats.mean
    if above >= EXTREME_LIMIT:
        result.append(f"the largest value is {above:.0%} above the mean")
    if below >= EXTREME_LIMIT:
        result.append(f"the smallest value is {below:.0%} below the mean")
    return result


def _first(sessions: Sequence[Sequence[float]]) -> list[str]:
    """Return a remark if a first repetition is far from the others: the warm-up was too short."""
    apart = 0.0
    for values in sessions:
        if len(values) >= MIN_REPETITIONS:
            others = statistics.median(values[1:])
            calm = max(values[1:]) - min(values[1:]) < FIRST_LIMIT / 2 * others
            distance = abs(values[0] / others - 1) if others else 0.0
            if calm and distance >= FIRST_LIMIT:
                apart = max(apart, distance)
    if not apart:
        return []
    return [f"the first repetition is {apart:.0%} off the others: more warm-up may be needed"]
