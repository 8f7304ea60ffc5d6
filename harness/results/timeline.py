"""Time line of a run: its phases, and the readings of its device's sensors meanwhile.

Repetitions stand end to end on one axis, as each has a clock of its own that begins with its
runner. Without a trace, Genie tells how long it loaded, when the first token came and the mean
decode rate, and not when each token came: decode steps are then drawn evenly, and are marked so.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buildlib.files import atomic_write_bytes
from harness.console import visible
from harness.errors import ArtifactError, HostFileError
from harness.results.derived import find_power
from harness.results.records import ArtifactRecord, RepetitionTelemetry, Run
from harness.results.run_recorder import TRACES
from harness.results.store import ResultsStore

MOST_TRACED = 4000
"""Samples of one channel in a trace; of more, the extremes are kept."""
MOST_STEPS = 4096
"""Decode steps of one repetition that are drawn one by one."""
EVEN = "drawn evenly: Genie reports the mean rate of a repetition"
_MOST_BYTES = 1 << 28
_GAP_S = 0.05
_WHOLE = frozenset({"QnnApi::graphExecute", "QnnNspModel::runInference"})
"""Functions of Genie that are kept where not all events fit."""
_LONGEST_NAME = 200
_LONGEST_S = 1e7  # no process of a runner lives for months
_UNREADABLE = (
    AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of a run.

    Attributes:
        name: `push`, `load`, `prefill`, `decode`, or `other` for the rest of the time.
        steps: tokens that a decode phase generated one by one.
        part: the repetition that it belongs to.
    """

    name: str
    start_s: float
    seconds: float
    part: str
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Counter:
    """The samples of one channel over the whole run, in stored units."""

    channel: str
    unit: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """One event of a trace, as a runner on the device recorded it.

    Attributes:
        kind: `call` of Genie's API, `function` inside the library, `token`, or `stage` of the
            deployment.
        thread: that of the library, from 0.
    """

    kind: str
    name: str
    start_s: float
    seconds: float
    thread: int = 0
    figures: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """Trace of one process of a runner, in seconds since its beginning.

    Attributes:
        left_out: events that the runner did not write.
    """

    events: tuple[Traced, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Traces:
    """Traces of a run; empty without a trace.

    Attributes:
        stages: of its deployment, with the seconds that each took.
        processes: one for each query.
    """

    stages: tuple[tuple[str, float], ...] = ()
    processes: tuple[Process, ...] = ()


UNTRACED = Traces()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Phases and samples of a run on one axis.

    Attributes:
        traced: events of the runners and the deployment, if the run was traced.
        left_out: events that are not among them.
    """

    run: Run
    spans: tuple[Span, ...]
    counters: tuple[Counter, ...]
    traced: tuple[Traced, ...] = ()
    left_out: int = 0

    @property
    def seconds(self) -> float:
        """Length of the axis."""
        return max((span.start_s + span.seconds for span in self.spans), default=0.0)


def read_traces(store: ResultsStore, artifacts: Iterable[ArtifactRecord]) -> Traces:
    """Read the traces among the files of a run; events of another form are skipped."""
    for artifact in artifacts:
        if artifact.name == TRACES:
            try:
                content_gz = store.read_artifact(artifact)
                content = zlib.decompressobj(31).decompress(content_gz, _MOST_BYTES)
            except (ArtifactError, zlib.error):
                return UNTRACED
            return _parse(content.splitlines())
    return UNTRACED


def _parse(lines: Sequence[bytes]) -> Traces:
    stages: list[tuple[str, float]] = []
    processes = []
    for line in lines:
        try:
            document = json.loads(line)
            if "stages" in document:
                pairs = ((visible(str(name)), float(s)) for name, s in document["stages"])
                stages += [(name[:_LONGEST_NAME], s) for name, s in pairs if 0 <= s < _LONGEST_S]
                continue
            facts = document["otherData"]
            began = float(facts["began_us"])
            traced = (_parse_event(event, began) for event in document["traceEvents"])
            events = tuple(event for event in traced if event is not None)
            processes.append(Process(events, int(facts.get("left_out", 0))))
        except _UNREADABLE:
            processes.append(Process(()))
    return Traces(tuple(stages), tuple(processes))


def _parse_event(event: Any, began_us: float) -> Traced | None:  # noqa: ANN401  (raw JSON)
    try:
        start, seconds = (float(event["ts"]) - began_us) / 1e6, float(event["dur"]) / 1e6
        kind, name, thread = event["cat"], event["name"], int(event["tid"])
        args = event.get("args") or {}
        figures = {
            visible(str(key))[:_LONGEST_NAME]: value
            for key, value in args.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
    except _UNREADABLE:
        return None
    fits = abs(start) < _LONGEST_S and 0 <= seconds < _LONGEST_S
    if not fits or kind not in {"call", "function", "token"} or not 0 <= thread < 1000:
        return None
    return Traced(kind, visible(str(name))[:_LONGEST_NAME], start, seconds, thread, figures)


def build_timeline(
    run: Run, telemetry: Sequence[RepetitionTelemetry], traces: Traces = UNTRACED
) -> Timeline:
    """Put the repetitions of a run on one axis, warm-ups first.

    Args:
        traces: their processes are the repetitions in that order.
    """
    stages, processes = traces.stages, traces.processes
    sampled = {(one.is_warmup, one.repetition): one.series for one in telemetry}
    timed = {(m.is_warmup, m.repetition) for m in run.measurements if m.metric in _TIMED}
    keys = sorted({*sampled, *timed}, key=lambda key: (not key[0], key[1]))
    spans: list[Span] = []
    traced: list[Traced] = []
    counters: dict[str, tuple[str, list[tuple[float, float | None]]]] = {}
    end = 0.0
    push_s = run.values("push_s")[:1] or [math.fsum(seconds for _, seconds in stages)]
    if push_s[0]:
        spans.append(Span("push", 0.0, push_s[0], "deployment"))
        traced += _stages(stages)
        end = push_s[0] + _GAP_S
    for index in range(max(len(keys), len(processes))):
        is_warmup, number = keys[index] if index < len(keys) else (False, index)
        series = sampled.get((is_warmup, number), ())
        power = find_power(series)
        series = series if power is None else (*series, power)
        part = f"{'warm-up' if is_warmup else _noun(run)} {number + 1}"
        events = processes[index].events if index < len(processes) else ()
        moments = [t for one in series for t in (one.t_s[:1] + one.t_s[-1:])]
        start = end - min([0.0, *moments])
        values = _values_of(run, is_warmup=is_warmup, repetition=number)
        phases = list(_traced_phases(events, start, part) or _phases(values, start, part))
        traced += (replace(event, start_s=start + event.start_s) for event in events)
        length = max([*moments, *(s.start_s + s.seconds - start for s in phases), 0.0])
        spans += phases or [Span("other", start, length, part)]
        for one in series:
            _, points = counters.setdefault(one.channel, (one.unit, []))
            if points:
                points.append((end - _GAP_S / 2, None))
            points += [(start + t, value) for t, value in zip(one.t_s, one.values, strict=True)]
        end = start + length + _GAP_S
    channels = (Counter(name, unit, tuple(points)) for name, (unit, points) in counters.items())
    left_out = sum(process.left_out for process in processes)
    return Timeline(run, tuple(spans), tuple(channels), tuple(traced), left_out)


_TIMED = frozenset({"init_s", "ttft_s", "decode_tokens_per_s", "elapsed_s"})


def _noun(run: Run) -> str:
    scored = run.workload.perplexity
    in_one_process = scored is not None and scored.positions == "decode_steps"
    return "window" if run.kind == "perplexity" and not in_one_process else "repetition"


def _values_of(run: Run, *, is_warmup: bool, repetition: int) -> dict[str, float]:
    """Return the values of one repetition by metric."""
    return {
        m.metric: m.value
        for m in run.measurements
        if m.is_warmup == is_warmup and m.repetition == repetition
    }


def _phases(values: Mapping[str, float], start: float, part: str) -> Iterator[Span]:
    """Yield the phases of one repetition, from when its runner began."""
    at = start
    load, first = values.get("init_s", 0.0), values.get("ttft_s", 0.0)
    if load:
        yield Span("load", at, load, part)
        at += load
    if first:
        yield Span("prefill", at, first, part)
        at += first
    rate, tokens = values.get("decode_tokens_per_s"), int(values.get("generated_tokens", 0))
    if rate and tokens > 1:
        yield Span("decode", at, (tokens - 1) / rate, part, tokens - 1)
        at += (tokens - 1) / rate
    rest_s = start + values.get("elapsed_s", 0.0) - at
    if rest_s > 0:
        yield Span("other", at, rest_s, part)


def _traced_phases(events: Sequence[Traced], start: float, part: str) -> list[Span]:
    """Return the phases of one process by its trace; none without one."""
    calls = sorted((e for e in events if e.kind == "call"), key=lambda e: e.start_s)
    tokens = sorted((e for e in events if e.kind == "token"), key=lambda e: e.start_s)
    if not calls:
        return []
    spans = [Span("other", start, calls[0].start_s, part)] if calls[0].start_s > 0 else []
    for call in calls:
        end = call.start_s + call.seconds
        mine = [e for e in tokens if call.start_s < e.start_s + e.seconds < end + 1e-3]
        if mine:
            tokens = [e for e in tokens if e not in mine]
            spans += _answer(mine, start, part)
        else:
            spans.append(Span(_phase_of(call), start + call.start_s, call.seconds, part))
    if tokens:  # Genie does not list a query that filled the context
        spans += _answer(tokens, start, part)
    return spans


_PREFILLS = frozenset({"GenieAccuracy_compute", "GenieEmbedding_generate"})
"""Calls that run a graph over a whole text and generate nothing."""


def _phase_of(call: Traced) -> str:
    if call.name.endswith("_create"):
        return "load"
    return "prefill" if call.name in _PREFILLS else "other"


def _answer(tokens: Sequence[Traced], start: float, part: str) -> Iterator[Span]:
    first = tokens[0].start_s + tokens[0].seconds
    last = tokens[-1].start_s + tokens[-1].seconds
    yield Span("prefill", start + tokens[0].start_s, tokens[0].seconds, part)
    if len(tokens) > 1:
        steps = int(sum((e.figures or {}).get("tokens", 1) for e in tokens[1:]))
        yield Span("decode", start + first, last - first, part, steps)


def _stages(stages: Sequence[tuple[str, float]]) -> Iterator[Traced]:
    at = 0.0
    for name, seconds in stages:
        yield Traced("stage", name, at, seconds)
        at += seconds


# The trace


def write_trace(store: ResultsStore, runs: Sequence[Run], path: Path) -> None:
    """Write the trace of stored runs into a file, packed if its name ends in `.gz`."""
    lines = [
        build_timeline(run, store.telemetry(run.id), read_traces(store, store.artifacts(run.id)))
        for run in runs
    ]
    content = to_trace(lines)
    try:
        atomic_write_bytes(path, gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error


_RUN, _PHASES, _STEPS, _CALLS, _LIBRARY = 1, 2, 3, 4, 10
"""Threads of a trace; those of the library follow. Its calls have their own: the clock of its
functions is known to within 0.3 ms, so none would lie within its call."""


def to_trace(timelines: Sequence[Timeline], most_events: int | None = None) -> bytes:
    """Convert to a trace in the Trace Event Format; each run is a process of it.

    The Perfetto UI and trace processor read it
    (https://perfetto.dev/docs/getting-started/other-formats#chrome-json-format).

    Args:
        most_events: of a run inside Genie; of more, the shortest functions are left out. By default
            all are there.
    """
    first = min((line.run.created_at for line in timelines), default=None)
    events: list[dict[str, object]] = []
    left_out = 0
    for pid, line in enumerate(timelines, 1):
        offset = (line.run.created_at - first).total_seconds() if first else 0.0
        traced = _most(line.traced, most_events)
        left_out += line.left_out + len(line.traced) - len(traced)
        events += ({**event, "pid": pid} for event in _events(line, traced, offset))
    facts = {
        "runs": [
            {
                "run": line.run.id,
                "began": line.run.created_at.isoformat(),
                "emulator": line.run.device.emulator,
                "container": line.run.container.sha256,
                "steps": "as Genie's trace tells" if line.traced else EVEN,
            }
            for line in timelines
        ],
        "events left out": left_out,
    }
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
    return json.dumps(document, separators=(",", ":")).encode()


def _most(traced: Sequence[Traced], most: int | None) -> Sequence[Traced]:
    if most is None or len(traced) <= most:
        return traced
    by_weight = sorted(
        traced, key=lambda e: (e.kind == "function" and e.name not in _WHOLE, -e.seconds)
    )
    return by_weight[:most]


@dataclass(frozen=True, slots=True)
class _Slice:
    tid: int
    name: str
    kind: str
    start_s: float
    seconds: float
    args: Mapping[str, object]


def _events(line: Timeline, traced: Sequence[Traced], offset: float) -> Iterator[dict[str, object]]:
    """Yield the events of one run, without `pid`."""
    run = line.run
    name = f"{run.kind} of {run.container.model} on {run.device.serial}"
    yield {"ph": "M", "name": "process_name", "args": {"name": visible(name)}}
    lanes = {_RUN: "run", _PHASES: "phases", _STEPS: "tokens" if traced else "decode steps"}
    threads = sorted({event.thread for event in traced if event.kind == "function"})
    lanes |= {_CALLS: "runtime API"} if any(event.kind == "call" for event in traced) else {}
    lanes |= {_LIBRARY + thread: f"runtime {thread}" if thread else "runtime" for thread in threads}
    for tid, lane in lanes.items():
        yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}
    slices = [*_parts(line.spans), *map(_slice_of, traced)]
    for span in line.spans:
        slices += _span_slices(span, even=not traced)
    yield from _nested(slices, offset)
    for counter in line.counters:
        title = visible(f"{counter.channel} ({counter.unit})")
        for t, value in thin(counter.points, MOST_TRACED):
            if value is not None:
                yield {"ph": "C", "name": title, "ts": _us(offset + t), "args": {"value": value}}


def _nested(slices: Sequence[_Slice], offset: float) -> Iterator[dict[str, object]]:
    """Yield the slices, each within the one around it on its thread.

    Genie rounds starts and durations to microseconds, and we to tenths; so an end can lie behind
    that of its caller, and Perfetto drops such a slice.
    """
    around: dict[int, list[int]] = {}  # by thread, the ends of the callers in tenths
    in_order = sorted(slices, key=lambda one: (round((offset + one.start_s) * 1e7), -one.seconds))
    for one in in_order:
        ends = around.setdefault(one.tid, [])
        start = round((offset + one.start_s) * 1e7)
        while ends and ends[-1] <= start:
            ends.pop()
        end = min([round((offset + one.start_s + one.seconds) * 1e7), *ends[-1:]])
        ends.append(end)
        yield {
            "ph": "X", "cat": one.kind, "tid": one.tid, "name": one.name, "ts": start / 10,
            "dur": (end - start) / 10, "args": one.args,
        }  # fmt: skip


def _slice_of(event: Traced) -> _Slice:
    lanes = {"stage": _PHASES, "token": _STEPS, "call": _CALLS}
    tid = lanes.get(event.kind, _LIBRARY + event.thread)
    figures = dict(event.figures or {})
    return _Slice(tid, event.name, event.kind, event.start_s, event.seconds, figures)


def _span_slices(span: Span, *, even: bool) -> Iterator[_Slice]:
    yield _Slice(_PHASES, span.name, "run", span.start_s, span.seconds, {"part": span.part})
    if even and 0 < span.steps <= MOST_STEPS:
        step = span.seconds / span.steps
        for number in range(span.steps):
            args = {"token": number + 2, "time": EVEN}
            start = span.start_s + number * step
            yield _Slice(_STEPS, f"token {number + 2}", "run", start, step, args)


def _parts(spans: Sequence[Span]) -> Iterator[_Slice]:
    """Return one slice around all phases of a repetition."""
    parts: dict[str, list[Span]] = {}
    for span in spans:
        parts.setdefault(span.part, []).append(span)
    for part, phases in parts.items():
        start = min(span.start_s for span in phases)
        end = max(span.start_s + span.seconds for span in phases)
        yield _Slice(_RUN, part, "run", start, end - start, {})


def thin(
    points: Sequence[tuple[float, float | None]], most: int
) -> Iterable[tuple[float, float | None]]:
    """Keep the lowest and the highest of each stretch of samples, and every gap."""
    width = math.ceil(2 * len(points) / most)
    if width <= 2:
        yield from points
        return
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        real = [(t, v) for t, v in bucket if v is not None]
        gaps = [(t, None) for t, v in bucket if v is None][:1]
        extremes = {min(real, key=lambda p: p[1]), max(real, key=lambda p: p[1])} if real else ()
        yield from sorted([*extremes, *gaps], key=lambda p: p[0])


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
