"""Drawing of a run's time line, and its trace to download."""

import base64
import gzip
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.results.timeline import (
    EVEN,
    Counter,
    Span,
    Timeline,
    thin,
    to_trace,
)
from reports.figures import Column, Figure, Samples, Spec, Value, lanes, quantity, shade

MOST_POINTS = 240
"""Samples of one channel in one repetition of a chart; of more, the extremes are kept."""
MOST_LINES = 6
MOST_EVENTS = 20_000
"""Events of Genie in the trace of a page."""
_LANES = ("push", "load", "prefill", "decode", "other")


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


def timeline_figure(timeline: Timeline) -> Figure | None:
    """Draw the phases, and under them the sensors; None without both."""
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
    drawn = [_span_lane(alone=not panels), *(_panel(kind) for kind, _, _ in panels)]
    rows = [*_span_rows(timeline.spans)]
    rows += [_channel_row(kind, one) for kind, counters, _ in panels for one in counters]
    return Figure(
        f"timeline-{timeline.run.id}",
        "Time line",
        "Repetitions end to end."
        + ("" if timeline.traced else f" Decode steps are {EVEN}.")
        + (f" Not shown: {_left_out(panels)}." if _left_out(panels) else ""),
        columns,
        tuple(rows),
        lanes(drawn, color="independent"),
        _samples(timeline.spans, panels),
    )


Panel = tuple[_Kind, list[Counter], int]


def _choose(counters: Sequence[Counter], kind: _Kind) -> tuple[list[Counter], int]:
    """Return the channels of a kind that change most or are highest, and how many are left out."""
    fitting = [
        one
        for one in counters
        if one.channel.partition(":")[0] in kind.prefixes
        and any(value is not None for _, value in one.points)
    ]
    best = sorted(fitting, key=lambda one: (-_interest(one), one.channel))[:MOST_LINES]
    return sorted(best, key=lambda one: one.channel), len(fitting) - len(best)


def _interest(counter: Counter) -> float:
    values = [value for _, value in counter.points if value is not None]
    return 2 * (max(values) - min(values)) + max(values)


def _left_out(panels: Sequence[Panel]) -> str:
    return ", ".join(
        f"{more} of {kind.title.partition(',')[0].lower()}" for kind, _, more in panels if more
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
            one.name,
            one.part,
            one.start_s,
            one.start_s + one.seconds,
            None,
            float(one.steps),
        )
        for one in spans
    ]
    for kind, counters, _ in panels:
        for one in counters:
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
                for t, v in thin(one.points, MOST_POINTS)
            ]
    return Samples(("panel", "name", "part", "start_s", "end_s", "value", "steps"), tuple(rows))


def _span_lane(*, alone: bool) -> Spec:
    name = {"field": "name", "type": "nominal", "scale": {"domain": list(_LANES)}}
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
            "y": {**name, "title": None},
            "color": {**name, "legend": None},
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
            "color": shade("name", 3),
            "tooltip": [
                {"field": "name", "type": "nominal", "title": "Channel"},
                {"field": "start_s", "type": "quantitative", "title": "At, s", "format": ".2f"},
                {"field": "value", "type": "quantitative", "title": kind.title, "format": ",.4~g"},
            ],
        },
    }


def trace_address(timeline: Timeline) -> str:
    """Return the trace as a `data:` address, for a page that loads nothing."""
    content = gzip.compress(to_trace([timeline], MOST_EVENTS), mtime=0)
    return "data:application/gzip;base64," + base64.b64encode(content).decode()
