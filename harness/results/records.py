"""Records of the results store: a `Run` (container x device x workload) and its `Measurement`s.

Records are frozen and checked when they are made, so that a value from a database or a device is
either legal or an error. Text is kept as it is, except for characters that no database can hold
(see `to_storable`).
"""

import math
import re
import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from harness.errors import TelemetryRecordError
from harness.results.metrics import MAX_COUNT, Measurement, find_metric
from harness.results.verdicts import Verdict, in_percent

RunKind = Literal["bench", "generate", "perplexity", "embed", "evaluate"]
RunStatus = Literal["running", "done", "failed", "interrupted"]
Positions = Literal[
    "first_cl_minus_ar",
    "draft_first_cl_minus_ar",
    "no_bos_first_cl_minus_ar",
    "draft_no_bos_first_cl_minus_ar",
    "second_half",
    "decode_steps",
    "all",
]
CheckOutcome = Literal["none", "passed", "failed"]
JsonScalar = str | int | float | bool | None

RUNTIME, GENIE = "runtime", "genie"
MAX_SAMPLES = 4_000_000
"""Samples of one repetition in all series together: 30 channels at 10 Hz for some three hours."""
MAX_SERIES = 1024
MAX_CHANNEL_LENGTH = 200
MAX_CONDITIONS = 64
MAX_LABELS = 64
MAX_SIZE = 2**63 - 1

_LINE_BREAKS = re.compile("[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")
_LONGEST_RUN_S = 1e7
_UNSTORABLE = {0: "\N{REPLACEMENT CHARACTER}"} | dict.fromkeys(
    range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}"
)


def to_storable(value: object) -> object:
    """Return text that every database can hold; anything but text is returned unchanged.

    U+FFFD replaces NUL, which PostgreSQL refuses, and lone surrogates, which are not UTF-8.
    """
    return value.translate(_UNSTORABLE) if isinstance(value, str) else value


def to_name(value: object) -> object:
    """Return storable text on one line, with a space for line breaks: lists have a name a line."""
    text = to_storable(value)
    return _LINE_BREAKS.sub(" ", text) if isinstance(text, str) else text


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError("a time without a time zone")
    return moment.astimezone(UTC)


StorableText = Annotated[str, BeforeValidator(to_storable)]
Name = Annotated[str, BeforeValidator(to_name)]
UtcMoment = Annotated[datetime, AfterValidator(_in_utc)]


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that JSON does not have")
    return value


RunId = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\Z")]
StorableScalar = Annotated[JsonScalar, BeforeValidator(_finite), BeforeValidator(to_storable)]
Condition = Mapping[StorableText, StorableScalar]
"""Preparation of a device before a run: JSON scalars by name."""
Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Size = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Versions = Mapping[Name, Name]
Labels = Annotated[Mapping[Name, Name], Field(max_length=MAX_LABELS)]
"""The user's own keys and values of a run: `{"team": "camera"}`."""
Clocks = Annotated[
    Mapping[StorableText, Annotated[float, Field(ge=0, le=1e12)]], Field(max_length=MAX_SERIES)
]
ArtifactKind = Literal["log", "profile", "trace", "other"]


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def new_run_id() -> str:
    """Create a run identifier: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def runtime_of(settings: Mapping[str, JsonScalar]) -> str:
    """Return the runtime among the settings of a run, where Genie goes without saying."""
    return str(settings.get(RUNTIME) or GENIE)


class Record(BaseModel):
    """Base class of stored records."""

    model_config = ConfigDict(frozen=True, extra="forbid", regex_engine="python-re")


class ContainerInfo(Record):
    """A container.

    Attributes:
        model: the model's name.
        sha256: the container's content hash; of an imported run, a hash of its file's facts about
            the model.
        target: of the compiler: `SM8750`, `SM8750:emulator`; empty for imported runs.
        ars: autoregression lengths of its graphs.
        cl: context length in tokens; 0 where an imported run does not tell.
        n_splits: number of parts; likewise.
        precision: bits of the linear layers, `W4A16`; `None` where the container does not tell.
        size_bytes: of all its files.
        parameters: number of weights of the model.
        quantization_loss: lines on what its quantization costs, as the container has them.
    """

    model: Name
    sha256: Sha256
    target: Name
    ars: tuple[Annotated[int, Field(ge=1)], ...]
    cl: Count
    n_splits: Count
    precision: Name | None = None
    size_bytes: Size | None = None
    parameters: Size | None = None
    quantization_loss: tuple[Name, ...] = ()

    @property
    def soc(self) -> str:
        """The SoC that it was compiled for; empty for any."""
        return self.target.partition(":")[0]


class DeviceInfo(Record):
    """A device.

    Attributes:
        soc: the SoC that the device reports, e.g. `SM8750`.
        dsp_arch: Hexagon architecture, e.g. `v79`.
        emulator: whether it is virtual: the HTP emulator stood in for the NPU, or the host's CPU
            for runtimes without one; its speed is not hardware speed.
        os_build: the build's name as the phone shows it, or the name of a Linux distribution.
        build_fingerprint: Android's own identity of a build; of a Linux machine, its kernel.
        clocks: limits of the processor clocks in Hz when the run began, by `cpu_cap_hz:CPU` (the
            kernel's) and `cpu_max_hz:CPU` (the hardware's).
    """

    serial: Name
    soc: Name
    emulator: bool
    model: Name | None = None
    manufacturer: Name | None = None
    dsp_arch: Name | None = None
    abi: Name | None = None
    android_version: Name | None = None
    ram_bytes: Size | None = None
    os_build: Name | None = None
    build_fingerprint: Name | None = None
    clocks: Clocks = Field(default_factory=dict)


class PerplexityDefinition(Record):
    """Definition of a perplexity; different definitions cannot be compared.

    Attributes:
        positions: scored positions of each window: Genie scores the first CL - AR, AR being the
            prefill graph's; `draft_` says that the draft model was scored, by its own AR, and
            `no_bos_` that nothing stands before a window, whose first token is not scored then.
            `decode_steps` are the second half of those, decoded one by one.
        windows: number of whole windows of one context length.
        tokens: number of scored tokens in all windows together.
    """

    positions: Positions
    windows: AtLeastOne
    tokens: AtLeastOne


class WorkloadRecord(Record):
    """The workload of a run.

    Attributes:
        runner: the program on the device.
        runner_sha256: hash of that program's file.
        prompt_tokens: requested prompt length; the metric of the same name has the actual one.
        depth_tokens: tokens in the context before the prompt, llama-bench's `-d`.
        repetitions: requested number of measured repetitions, without warm-ups.
        sampler: settings that runs must share to be compared, such as those of the sampler.
        prompt: the prompt's text; its hash is enough for long ones.
        dataset_sha256: hash of the text behind a perplexity.
    """

    runner: Annotated[Name, Field(min_length=1)]
    runner_sha256: Sha256 | None = None
    prompt_tokens: Count | None = None
    depth_tokens: Count | None = None
    max_new_tokens: Count | None = None
    repetitions: Count = 1
    warmup: Count = 0
    sampler: Mapping[StorableText, StorableScalar] = Field(default_factory=dict)
    prompt: StorableText | None = None
    prompt_sha256: Sha256 | None = None
    dataset_sha256: Sha256 | None = None
    perplexity: PerplexityDefinition | None = None

    @property
    def runtime(self) -> str:
        """Name of the runtime that ran the model."""
        return runtime_of(self.sampler)


class Provenance(Record):
    """Versions and host of a run.

    Attributes:
        toolchain: name of the container's compiler.
        toolchain_versions: versions of the compiler and its parts.
        library_versions: versions of the libraries on the device and on the host.
        git_commit: commit of the user's working folder, if that is a repository.
        git_dirty: whether that folder held uncommitted changes.
        git_branch: its branch.
    """

    toolchain: Name
    toolchain_versions: Versions
    library_versions: Versions
    qnnfarm_version: Name
    host: Name
    git_commit: Name | None = None
    git_dirty: bool | None = None
    git_branch: Name | None = None


class Origin(Record):
    """Origin of an imported run: another tool's file.

    Attributes:
        tool: that wrote the file, e.g. `llama-bench`.
        file: its name, without folders.
        sha256: hash of the text in it that tells of the run, by which the run is known.
    """

    tool: Annotated[Name, Field(min_length=1)]
    file: Name
    sha256: Sha256


class ArtifactRecord(Record):
    """A file that is kept with a run; `harness.results.artifacts` has its content.

    Attributes:
        name: unique in the run.
        sha256: hash of its content.
    """

    name: Annotated[Name, Field(min_length=1, max_length=200)]
    kind: ArtifactKind
    sha256: Sha256
    size_bytes: Size


class OutputCheck(Record):
    """Check of a run's output; unless it is correct, its speeds mean nothing.

    Attributes:
        outcome: `none` when there was nothing to check against.
        reason: the reference of the check, or the fault, in words.
    """

    outcome: CheckOutcome = "none"
    reason: StorableText = ""


@dataclass(frozen=True, slots=True)
class TelemetrySeries:
    """The samples of one sensor during one repetition.

    Attributes:
        channel: the sensor: `temp_c:cpu-0-0`, `cpu_hz:7`, `rss_bytes`.
        unit: of the values: `degC`, `Hz`, `bytes`, `A`, `V`.
        t_s: seconds since the runner began, ascending; negative before it.
        values: one for each time; None where the sensor gave nothing.

    Raises:
        TelemetryRecordError: names the channel and its fault.
    """

    channel: str
    unit: str
    t_s: tuple[float, ...]
    values: tuple[float | None, ...]

    def __post_init__(self) -> None:
        for name in (self.channel, self.unit):
            if (
                to_storable(name) != name
                or not name.isprintable()
                or len(name) > MAX_CHANNEL_LENGTH
            ):
                raise TelemetryRecordError(
                    self.channel, "its name or unit is not short printable text"
                )
        if not self.channel:
            raise TelemetryRecordError(self.channel, "it has no name")
        if len(self.t_s) != len(self.values):
            reason = f"{len(self.t_s)} times for {len(self.values)} values"
            raise TelemetryRecordError(self.channel, reason)
        if not all(math.isfinite(value) for value in self.values if value is not None):
            raise TelemetryRecordError(self.channel, "a value is not finite")
        if not all(math.isfinite(moment) and abs(moment) <= _LONGEST_RUN_S for moment in self.t_s):
            raise TelemetryRecordError(self.channel, "a time is not one within a run")
        if any(after < before for before, after in pairwise(self.t_s)):
            raise TelemetryRecordError(self.channel, "its time runs backwards")


@dataclass(frozen=True, slots=True)
class RepetitionTelemetry:
    """All series of one repetition; repetitions are numbered as for measurements."""

    repetition: int
    is_warmup: bool
    series: tuple[TelemetrySeries, ...]


SIDES = frozenset({"A", "B"})
"""The labels of runs that took turns in a comparison; no history and no gate has them."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """Place of a run in the history of its database.

    Attributes:
        subject: id of its `harness.results.identity.Subject`.
        has_history: whether it is done, with an output that was not found wrong, and no side of a
            comparison.
        device: its serial.
        sha256: of the container.
        conditions: as `Run` has them.
    """

    id: str
    created_at: datetime
    commit: str | None
    branch: str | None
    subject: str = ""
    has_history: bool = False
    device: str = ""
    sha256: str = ""
    conditions: Sequence[Condition] = ()

    @classmethod
    def of(cls, run: "Run", subject: str = "") -> "RunHead":
        """Return the head of a run."""
        return cls(
            run.id,
            run.created_at,
            run.provenance.git_commit,
            run.provenance.git_branch,
            subject,
            run.status == "done" and run.check.outcome != "failed" and run.label not in SIDES,
            run.device.serial,
            run.container.sha256,
            run.conditions,
        )


class Comparison(Record):
    """Finding of a comparison of A with B for one metric.

    Attributes:
        ratio: B over A, the geometric mean over the pairs; None without a pair.
        low, high: an interval around `ratio`; None where there are too few pairs for one.
        confidence: of that interval.
        pairs: number of pairs of sessions.
        reason: the verdict in words.
    """

    metric: str
    verdict: Verdict = Verdict.NO_VERDICT
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float = 0.0
    pairs: Count = 0
    reason: StorableText

    @model_validator(mode="after")
    def _is_known(self) -> "Comparison":
        find_metric(self.metric)
        return self

    @property
    def cells(self) -> tuple[str, str]:
        """The change from A to B and its interval: `-9.5%`, `-10.9% to -8.2%`."""
        return in_percent(self.ratio, self.low, self.high)


class ComparisonRecord(Record):
    """A comparison of A with B: its terms and verdicts.

    Attributes:
        group_id: of the runs of both sides.
        metrics: those that are judged, together.
        threshold: the part of A that B may lose without being a regression.
        verdicts: by metric; empty where the comparison did not end.
    """

    group_id: RunId
    created_at: UtcMoment = Field(default_factory=now)
    metrics: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]
    threshold: Annotated[float, Field(ge=0, le=1)]
    verdicts: tuple[Comparison, ...] = ()

    @model_validator(mode="after")
    def _are_known(self) -> "ComparisonRecord":
        for key in self.metrics:
            find_metric(key)
        return self


class Run(Record):
    """One container x device x workload.

    A run without a result stays in the store with its `error`. A run that is read as `interrupted`
    lost its writer: the process died before it recorded how the run ended.

    Attributes:
        group_id: shared by runs that belong together: the sessions of one cell, or both sides of a
            comparison.
        session: number of the session in its group, from 0.
        label: distinguishes the members of a group: `A`, `B`, a cell's name.
        labels: the user's own keys and values.
        plan: name of the plan that it is a cell of.
        concurrent_sessions: most sessions that ran at once on its host meanwhile, itself included;
            1 ran alone, None is unknown.
        origin: the file that it was imported from; None for a run of qnnfarm.
        conditions: preparations of the device before the run.
        check: whether its output was found correct.
        warmup_detected: whether warm-up ended; None if its length was given.
    """

    id: RunId = Field(default_factory=new_run_id)
    group_id: RunId = Field(default_factory=new_run_id)
    session: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    label: Name = ""
    labels: Labels = Field(default_factory=dict)
    plan: Name | None = None
    concurrent_sessions: AtLeastOne | None = None
    origin: Origin | None = None
    created_at: UtcMoment = Field(default_factory=now)
    finished_at: UtcMoment | None = None
    kind: RunKind
    status: RunStatus = "running"
    error: StorableText | None = None
    container: ContainerInfo
    device: DeviceInfo
    workload: WorkloadRecord
    provenance: Provenance
    generated_text: StorableText | None = None
    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_CONDITIONS)] = ()
    check: OutputCheck = OutputCheck()
    warmup_detected: bool | None = None
    measurements: tuple[Measurement, ...] = ()

    @model_validator(mode="after")
    def _error_goes_with_status(self) -> "Run":
        if self.status == "failed" and not self.error:
            raise ValueError("a failed run needs its error")
        if self.status == "done" and self.error:
            raise ValueError("a done run has no error")
        if self.status == "done" and self.check.outcome == "failed":
            raise ValueError("a run with a failed output check is not done")
        return self

    def values(self, metric: str, *, warmup: bool = False) -> tuple[float, ...]:
        """Return one metric's values by repetition: the measured ones, or the warm-ups."""
        matching = [m for m in self.measurements if m.metric == metric and m.is_warmup == warmup]
        return tuple(m.value for m in sorted(matching, key=lambda m: m.repetition))


@dataclass(frozen=True, slots=True)
class RunMeans:
    """A run without its measurements, and their means by metric, without warm-ups."""

    run: Run
    means: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> "RunMeans":
        """Compute the means of a run that is in memory with its measurements."""
        values: dict[str, list[float]] = {}
        for one in run.measurements:
            if not one.is_warmup:
                values.setdefault(one.metric, []).append(one.value)
        return cls(run, {key: statistics.fmean(series) for key, series in values.items()})
