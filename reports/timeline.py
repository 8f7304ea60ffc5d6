"""Time line of a run: what it did when, and what its device's sensors read meanwhile.

Repetitions stand end to end on one axis, as each has a clock of its own that begins with its
runner. Genie tells how long it loaded, when the first token came and the mean decode rate, and not
when each token came: decode steps are drawn evenly, and are marked so.
"""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.console import visible
from harness.results.records import RepetitionTelemetry, Run, TelemetrySeries
from reports.figures import Column, Figure, Samples, Spec, Value, quantity

MOST_POINTS = 240
"""Samples of one channel in one repetition of a chart; of more, the extremes are kept."""
MOST_TRACED = 4000
"""The same for a trace."""
MOST_LINES = 6
MOST_STEPS = 4096
"""Decode steps of one repetition that are drawn one by one."""
EVEN = "drawn evenly: Genie reports the mean rate of a repetition"
_GAP_S = 0.05
_LANES = ("push", "load", "prefill", "decode", "other")


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of a run.

    Attributes:
        name: `push`, `load`, `prefill`, `decode`, or `other` for what Genie does not account for.
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
class Timeline:
    """Phases and samples of a run on one axis."""

    run: Run
    spans: tuple[Span, ...]
    counters: tuple[Counter, ...]

    @property
    def seconds(self) -> float:
        """Length of the axis."""
        return max((span.start_s + span.seconds for span in self.spans), default=0.0)


@dataclass(frozen=True, slots=True)
class _Kind:
    title: str
    prefixes: tuple[str, ...]
    scale: float = 1.0


_KINDS = (
    _Kind("Temperature, °C", ("temp_c",)),
    _Kind("Clocks, MHz", ("cpu_hz", "ddr_hz", "gpu_hz"), 1e-6),
    _Kind("Clock limits, MHz", ("cpu_cap_hz",), 1e-6),
    _Kind("Memory, MiB", ("rss_bytes", "rss_anon_bytes", "rss_file_bytes"), 2.0**-20),
    _Kind("Battery power, W", ("battery_w",)),
)


def build_timeline(run: Run, telemetry: Sequence[RepetitionTelemetry]) -> Timeline:
    """Put the repetitions of a run on one axis, warm-ups first."""
    sampled = {(one.is_warmup, one.repetition): one.series for one in telemetry}
    parts = {(m.is_warmup, m.repetition) for m in run.measurements if m.metric in _TIMED}
    spans: list[Span] = []
    counters: dict[str, tuple[str, list[tuple[float, float | None]]]] = {}
    end = 0.0
    for value in run.values("push_s")[:1]:
        spans.append(Span("push", 0.0, value, "deployment"))
        end = value + _GAP_S
    for is_warmup, number in sorted({*sampled, *parts}, key=lambda key: (not key[0], key[1])):
        series = with_power(sampled.get((is_warmup, number), ()))
        part = f"{'warm-up' if is_warmup else 'repetition'} {number + 1}"
        moments = [t for one in series for t in (one.t_s[:1] + one.t_s[-1:])]
        start = end - min([0.0, *moments])
        found = list(_phases(_values(run, is_warmup, number), start, part))
        length = max([*moments, *(s.start_s + s.seconds - start for s in found), 0.0])
        spans += found or [Span("other", start, length, part)]
        for one in series:
            _, points = counters.setdefault(one.channel, (one.unit, []))
            if points:
                points.append((end - _GAP_S / 2, None))
            points += [(start + t, value) for t, value in zip(one.t_s, one.values, strict=True)]
        end = start + length + _GAP_S
    ordered = (Counter(name, unit, tuple(points)) for name, (unit, points) in counters.items())
    return Timeline(run, tuple(spans), tuple(ordered))


_TIMED = frozenset({"init_s", "ttft_s", "decode_tokens_per_s", "elapsed_s"})


def _values(run: Run, is_warmup: bool, number: int) -> dict[str, float]:  # noqa: FBT001
    return {
        m.metric: m.value
        for m in run.measurements
        if m.is_warmup == is_warmup and m.repetition == number
    }


def _phases(values: dict[str, float], start: float, part: str) -> Iterable[Span]:
    """The phases of one repetition, from when its runner began."""
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
    left = start + values.get("elapsed_s", 0.0) - at
    if left > 0:
        yield Span("other", at, left, part)


def with_power(series: Sequence[TelemetrySeries]) -> tuple[TelemetrySeries, ...]:
    """Add power, if current and voltage were sampled together.

    Makers disagree on the sign of a current, so only its size counts.
    """
    found = {one.channel: one for one in series}
    current, voltage = found.get("battery_a"), found.get("battery_v")
    if current is None or voltage is None or current.t_s != voltage.t_s:
        return tuple(series)
    power = tuple(
        None if a is None or v is None else abs(a * v)
        for a, v in zip(current.values, voltage.values, strict=True)
    )
    return (*series, TelemetrySeries("battery_w", "W", current.t_s, power))


def energy_per_token(run: Run, telemetry: Sequence[RepetitionTelemetry]) -> float | None:
    """Return the battery energy of the measured repetitions per generated token, in joules.

    It is that of the whole phone, from the start of a runner to its end, by the trapezoidal rule.
    """
    joules, tokens = 0.0, 0.0
    for one in telemetry:
        power = next((s for s in with_power(one.series) if s.channel == "battery_w"), None)
        made = _values(run, one.is_warmup, one.repetition).get("generated_tokens", 0.0)
        if power is None or one.is_warmup or not made:
            continue
        known = [(t, v) for t, v in zip(power.t_s, power.values, strict=True) if v is not None]
        joules += sum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(known))
        tokens += made
    return joules / tokens if joules and tokens else None


def timeline_figure(timeline: Timeline) -> Figure | None:
    """Draw the phases, and under them what the sensors read; None without both."""
    if not timeline.spans:
        return None
    panels = [(kind, *_choose(timeline.counters, kind)) for kind in _KINDS]
    panels = [panel for panel in panels if panel[1]]
    columns = (
        Column("what", "Phase or channel"),
        Column("count", "Count or samples", "number", 0),
        Column("low", "Lowest", "number"),
        Column("mean", "Mean", "number"),
        Column("high", "Highest", "number"),
        Column("unit", "Unit"),
    )
    rows = [*_span_rows(timeline.spans)]
    rows += [_channel_row(kind, one) for kind, found, _ in panels for one in found]
    return Figure(
        f"timeline-{timeline.run.id}",
        "Time line",
        f"Repetitions end to end. Decode steps are {EVEN}."
        + (f" Not shown: {_left_out(panels)}." if _left_out(panels) else ""),
        columns,
        tuple(rows),
        {
            "vconcat": [_span_lane(alone=not panels), *(_panel(kind) for kind, _, _ in panels)],
            "spacing": 8,
            "resolve": {"scale": {"x": "shared", "color": "independent"}},
        },
        _samples(timeline.spans, panels),
    )


Panel = tuple[_Kind, list[Counter], int]


def _choose(counters: Sequence[Counter], kind: _Kind) -> tuple[list[Counter], int]:
    """The channels of a kind that change most or are highest, and how many are left out."""
    fitting = [
        one
        for one in counters
        if one.channel.partition(":")[0] in kind.prefixes
        and any(value is not None for _, value in one.points)
    ]
    ranked = sorted(fitting, key=lambda one: (-_interest(one), one.channel))[:MOST_LINES]
    return sorted(ranked, key=lambda one: one.channel), len(fitting) - len(ranked)


def _interest(counter: Counter) -> float:
    values = [value for _, value in counter.points if value is not None]
    return 2 * (max(values) - min(values)) + max(values)


def _left_out(panels: Sequence[Panel]) -> str:
    return ", ".join(
        f"{left} of {kind.title.partition(',')[0].lower()}" for kind, _, left in panels if left
    )


def _span_rows(spans: Sequence[Span]) -> Iterable[tuple[Value, ...]]:
    for name in _LANES:
        seconds = [span.seconds for span in spans if span.name == name]
        if seconds:
            mean = math.fsum(seconds) / len(seconds)
            yield (name, float(len(seconds)), min(seconds), mean, max(seconds), "s")


def _channel_row(kind: _Kind, counter: Counter) -> tuple[Value, ...]:
    values = [value * kind.scale for _, value in counter.points if value is not None]
    unit = kind.title.rpartition(", ")[2]
    mean = math.fsum(values) / len(values)
    return (counter.channel, float(len(values)), min(values), mean, max(values), unit)


def _samples(spans: Sequence[Span], panels: Sequence[Panel]) -> Samples:
    rows: list[tuple[Value, ...]] = [
        (
            "phase",
            span.name,
            span.part,
            span.start_s,
            span.start_s + span.seconds,
            None,
            float(span.steps),
        )
        for span in spans
    ]
    for kind, found, _ in panels:
        for one in found:
            rows += [
                (
                    kind.title,
                    one.channel,
                    None,
                    round(t, 3),
                    None,
                    None if v is None else round(v * kind.scale, 3),
                    None,
                )
                for t, v in _thin(one.points, MOST_POINTS)
            ]
    return Samples(("panel", "name", "part", "start_s", "end_s", "value", "steps"), tuple(rows))


def _thin(
    points: Sequence[tuple[float, float | None]], most: int
) -> Iterable[tuple[float, float | None]]:
    """Keep the lowest and the highest of each stretch of samples, and every gap."""
    width = math.ceil(2 * len(points) / most)
    if width <= 2:
        yield from points
        return
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        known = [(t, v) for t, v in bucket if v is not None]
        gaps = [(t, None) for t, v in bucket if v is None][:1]
        extremes = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else ()
        yield from sorted([*extremes, *gaps], key=lambda p: p[0])


def _span_lane(*, alone: bool) -> Spec:
    return {
        "width": "container",
        "height": 22 * len(_LANES),
        "transform": [{"filter": "datum.panel === 'phase'"}],
        "mark": {"type": "bar", "height": 12},
        "encoding": {
            "x": quantity(
                "start_s", "Seconds" if alone else "", scale={"nice": False}, axis={"labels": alone}
            ),
            "x2": {"field": "end_s"},
            "y": {
                "field": "name",
                "type": "nominal",
                "title": None,
                "scale": {"domain": list(_LANES)},
            },
            "color": {
                "field": "name",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": list(_LANES)},
            },
            "tooltip": [
                {"field": "part", "type": "nominal", "title": "Part"},
                {"field": "name", "type": "nominal", "title": "Phase"},
                {"field": "start_s", "type": "quantitative", "title": "From, s", "format": ".3f"},
                {"field": "end_s", "type": "quantitative", "title": "To, s", "format": ".3f"},
                {"field": "steps", "type": "quantitative", "title": "Steps"},
            ],
        },
    }


def _panel(kind: _Kind) -> Spec:
    return {
        "width": "container",
        "height": 110,
        "transform": [{"filter": f"datum.panel === '{kind.title}'"}],
        "mark": {"type": "line", "strokeWidth": 1.5, "invalid": "break-paths-show-domains"},
        "encoding": {
            "x": quantity("start_s", "Seconds", scale={"nice": False}),
            "y": quantity("value", kind.title),
            "color": {
                "field": "name",
                "type": "nominal",
                "title": None,
                "legend": {"orient": "bottom", "columns": 3},
            },
            "tooltip": [
                {"field": "name", "type": "nominal", "title": "Channel"},
                {"field": "start_s", "type": "quantitative", "title": "At, s", "format": ".2f"},
                {"field": "value", "type": "quantitative", "title": kind.title, "format": ",.4~g"},
            ],
        },
    }


def to_trace(timeline: Timeline) -> bytes:
    """Convert to a trace in the Trace Event Format, gzipped.

    The Perfetto UI and trace processor read it
    (https://perfetto.dev/docs/getting-started/other-formats#chrome-json-format).
    """
    run = timeline.run
    name = f"{run.kind} of {run.container.model} on {run.device.serial}"
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": visible(name)}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(("run", "phases", "decode steps"), 1)
        ),
    ]
    for span in timeline.spans:
        events += _span_events(span)
    for counter in timeline.counters:
        title = visible(f"{counter.channel} ({counter.unit})")
        events += (
            {"ph": "C", "name": title, "pid": 1, "ts": _us(t), "args": {"value": value}}
            for t, value in _thin(counter.points, MOST_TRACED)
            if value is not None
        )
    events += _part_events(timeline.spans)
    facts = {
        "run": run.id,
        "began": run.created_at.isoformat(),
        "emulator": run.device.emulator,
        "container": run.container.sha256,
        "decode steps": EVEN,
    }
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def trace_address(timeline: Timeline) -> str:
    """Return the trace as a `data:` address, for a page that loads nothing."""
    return "data:application/gzip;base64," + base64.b64encode(to_trace(timeline)).decode()


def _span_events(span: Span) -> Iterable[dict[str, object]]:
    base = {"ph": "X", "cat": "run", "pid": 1}
    times = {"ts": _us(span.start_s), "dur": _us(span.seconds)}
    yield {**base, **times, "name": span.name, "tid": 2, "args": {"part": span.part}}
    if 0 < span.steps <= MOST_STEPS:
        step = span.seconds / span.steps
        for number in range(span.steps):
            times = {"ts": _us(span.start_s + number * step), "dur": _us(step)}
            args = {"token": number + 2, "time": EVEN}
            yield {**base, **times, "name": f"token {number + 2}", "tid": 3, "args": args}


def _part_events(spans: Sequence[Span]) -> Iterable[dict[str, object]]:
    """One slice around all phases of a repetition."""
    parts: dict[str, list[Span]] = {}
    for span in spans:
        parts.setdefault(span.part, []).append(span)
    for part, found in parts.items():
        start = min(span.start_s for span in found)
        end = max(span.start_s + span.seconds for span in found)
        times = {"ts": _us(start), "dur": _us(end - start)}
        yield {"ph": "X", "cat": "run", "pid": 1, "tid": 1, "name": part, "args": {}, **times}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
