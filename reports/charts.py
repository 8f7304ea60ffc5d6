"""Charts of a report: histories, curves, repetitions; each one a `Figure`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from operator import itemgetter

from harness.results.history import Series
from harness.results.identity import Subject, container_name, place
from harness.results.metrics import (
    JUDGED_METRICS,
    LEADING_METRICS,
    METRICS,
    Direction,
    Metric,
    find_metric,
)
from harness.results.perplexity import describe_scored
from harness.results.records import Run, RunMeans
from harness.results.verdicts import allowed_loss
from harness.words import percent
from reports.figures import (
    Column,
    Figure,
    Spec,
    Value,
    lanes,
    moment,
    quantity,
    shade,
    tooltips,
)
from reports.history import HistoryPoint, SeriesGroup, commit_range
from reports.text import day

LANE_HEIGHT = 120
CURVE_HEIGHT = 280
_LENGTHS = {
    "depth": "Depth of the context",
    "prompt": "Prompt",
    "context": "Context length",
}
MOST_NOTES = 5
"""Changes of a history that are written beneath its title, the newest ones."""
_LEVEL = "_level"
_BITS = re.compile(r"[Ww](\d+)")
_MIB = 2.0**20


def metric_column(metric: Metric) -> Column:
    """Return a column of a metric, in the unit that people read."""
    in_key = metric.shown_unit.lower().replace("/", "_per_").replace("%", "percent")
    key = metric.key if metric.scale == 1 else f"{metric.name}_{in_key}"
    unit = f", {metric.shown_unit}" if metric.shown_unit else ""
    return Column(key, f"{metric.label}{unit}", "number", metric.decimals)


def shown(metric: Metric, value: float | None) -> float | None:
    """Convert a stored value to the unit that people read."""
    return None if value is None else value * metric.scale


def history_figure(group: SeriesGroup) -> Figure:
    """Draw the history of a subject: one lane for each metric over one time axis."""
    metrics = [series.metric for series in group.series]
    columns = (
        Column("at", "Began (UTC)", "time"),
        *map(metric_column, metrics),
        *map(_level_column, metrics),
        Column("sessions", "Sessions", "number", 0),
        Column("device", "Device"),
        Column("commit", "Commit"),
        Column("container", "Container"),
        Column("change", "Change of level"),
        Column("run", "Run"),
    )
    levels, change_at = [_levels(series) for series in group.series], _changes_by_point(group)
    rows = tuple(_history_row(point, metrics, levels, change_at) for point in group.points)
    tips = [column for column in columns[:-1] if not column.key.endswith(_LEVEL)]
    return Figure(
        f"history-{group.id}",
        group.title,
        "Means of each night's sessions. A large point is the first of another container, the line "
        "through the points their level, a red or green bar a change of it.",
        columns,
        rows,
        lanes(_lane(one, tips, last=one is group.series[-1]) for one in group.series),
        notes=(
            *(f"{day(at)}: {change_at[at]}" for at in sorted(change_at, reverse=True)[:MOST_NOTES]),
            *(
                f"{one.metric.label}: {one.sensitivity}"
                for one in group.series
                if (one.smallest_loss or 0) > allowed_loss(one.metric)
            ),
        ),
    )


def _level_column(metric: Metric) -> Column:
    column = metric_column(metric)
    return Column(f"{column.key}{_LEVEL}", f"Level of {column.label}", "number", column.decimals)


def _levels(series: Series) -> dict[datetime, float]:
    """Return the level of each night, in the unit that people read."""
    return {
        night.at: level * series.metric.scale
        for first, last, level in series.levels()
        for night in series.nights[first : last + 1]
    }


def _history_row(
    point: HistoryPoint,
    metrics: Sequence[Metric],
    levels: Sequence[Mapping[datetime, float]],
    told: Mapping[datetime, str],
) -> tuple[Value, ...]:
    devices = sorted({run.device for run in point.runs})
    return (
        point.at,
        *(shown(metric, point.values.get(metric.key)) for metric in metrics),
        *(level.get(point.at) for level in levels),
        float(len(point.runs)),
        ", ".join(devices[:3]),
        (point.runs[-1].commit or "")[:12],
        point.sha256[:12],
        told.get(point.at),
        point.runs[-1].id,
    )


def _changes_by_point(group: SeriesGroup) -> dict[datetime, str]:
    """Name the changed metrics at each point, their commits, and the other differences."""
    metrics: dict[datetime, list[str]] = {}
    facts: dict[datetime, dict[str, None]] = {}
    for series in group.series:
        for change in series.changes:
            night = series.nights[change.night]
            words = f"{series.metric.label} {percent(change.ratio - 1)}"
            metrics.setdefault(night.at, []).append(words)
            words_of_change = (commit_range(series, night), *series.differences(change))
            facts.setdefault(night.at, {}).update(dict.fromkeys(filter(None, words_of_change)))
    return {at: "; ".join((", ".join(words), *facts[at])) for at, words in metrics.items()}


def _lane(series: Series, columns: Sequence[Column], *, last: bool) -> Spec:
    column = metric_column(series.metric)
    axis = {} if last else {"labels": False, "ticks": False}
    y = quantity(column.key, column.label, axis={"format": ",.5~g"})
    level = f"{column.key}{_LEVEL}"
    return {
        "width": "container",
        "height": LANE_HEIGHT,
        "encoding": {"x": moment("at", axis=axis)},
        "layer": [
            {"mark": {"type": "line", "opacity": 0.3}, "encoding": {"y": y}},
            {
                "transform": [{"filter": f"isValid(datum['{level}'])"}],
                "mark": {
                    "type": "line", "interpolate": "step-after", "color": {"expr": "ink"},
                },
                "encoding": {"y": {**y, "field": level}},
            },
            *([_change_marks(series.metric, level)] if series.changes else ()),
            {
                "transform": [
                    {"filter": f"isValid(datum['{column.key}'])"},
                    {
                        "window": [{"op": "lag", "field": "container", "as": "before"}],
                        "sort": [{"field": "at"}],
                    },
                ],
                "mark": {"type": "point", "filled": True, "opacity": 1},
                "encoding": {
                    "y": y,
                    "size": {
                        "condition": {
                            "test": "!datum.before || datum.before === datum.container",
                            "value": 22,
                        },
                        "value": 70,
                    },
                    "tooltip": tooltips(columns),
                },
            },
        ],
    }  # fmt: skip


def _change_marks(metric: Metric, level: str) -> Spec:
    """Mark the nights with which a level changed, by whether it is better."""
    better = "<" if metric.direction is Direction.LOWER else ">"
    changed = f"isValid(datum.change) && isValid(datum.was) && datum.was !== datum['{level}']"
    return {
        "transform": [
            {"filter": f"isValid(datum['{level}'])"},
            {"window": [{"op": "lag", "field": level, "as": "was"}], "sort": [{"field": "at"}]},
        ],
        "mark": {"type": "rule", "opacity": 0.4},
        "encoding": {
            "size": {"condition": {"test": changed, "value": 7}, "value": 0},
            "color": {
                "condition": {
                    "test": f"datum['{level}'] {better} datum.was",
                    "value": {"expr": "good"},
                },
                "value": {"expr": "bad"},
            },
            "tooltip": {"field": "change", "type": "nominal", "title": "Change"},
        },
    }


def curve_figures(groups: Sequence[SeriesGroup]) -> tuple[Figure, ...]:
    """Draw speeds against lengths and perplexities against bits, where two of these are known."""
    figures = [
        _length_figure(groups, find_metric(key), length)
        for length in _LENGTHS
        for key in (*LEADING_METRICS, "ttft_s")
    ]
    figures += [_quality_figure(groups, against) for against in ("bits", "size")]
    return tuple(figure for figure in figures if figure is not None)


def _newest_with(group: SeriesGroup, metric: str) -> HistoryPoint | None:
    return next((point for point in reversed(group.points) if metric in point.values), None)


def _length_figure(groups: Sequence[SeriesGroup], metric: Metric, length: str) -> Figure | None:
    points: dict[tuple[str, int], HistoryPoint] = {}
    for one in groups:
        point, (x, other) = _newest_with(one, metric.key), _length_of(one, metric, length)
        if point is not None and x is not None:
            at = (", ".join(filter(None, (_line_name(one), other))), x)
            points[at] = max(points.get(at, point), point, key=lambda each: each.at)
    lengths = Counter(line for line, _ in points)
    rows = tuple(
        (line, float(x), shown(metric, point.values[metric.key]), point.at)
        for (line, x), point in sorted(points.items(), key=itemgetter(0))
        if lengths[line] > 1
    )
    if not rows:
        return None
    name, column = _LENGTHS[length], metric_column(metric)
    columns = (
        Column("line", "Model and workload"),
        Column("tokens", f"{name}, tokens", "number", 0),
        column,
        Column("at", "Measured (UTC)", "time"),
    )
    return Figure(
        f"curve-{length}-{metric.name.partition('_')[0]}",
        f"{metric.label} against {name.lower()}",
        "The newest result of each length.",
        columns,
        rows,
        _curve(columns, "tokens", f"{name}, tokens", column, [int(row[1]) for row in rows]),
    )


def _length_of(group: SeriesGroup, metric: Metric, length: str) -> tuple[int | None, str]:
    """Return a length of a group's runs, and in words what tells its line from others."""
    run, subject = group.newest, Subject.of(group.newest)
    work, cl = run.workload, f"CL {run.container.cl}" if run.container.cl else ""
    if length == "context":
        return run.container.cl or None, subject.label
    if length == "prompt":
        behind = f"d{work.depth_tokens}" if work.depth_tokens else ""
        return work.prompt_tokens, ", ".join(filter(None, (behind, cl)))
    depth = work.depth_tokens or 0
    if metric.key == "decode_tokens_per_s":  # it begins behind the run's own prompt
        depth += (work.prompt_tokens or 0) if subject.measures_prompt else 0
        subject = replace(subject, prompt_tokens=None)
    elif metric.key == "prefill_tokens_per_s":
        subject = replace(subject, max_new_tokens=None)
    return depth, ", ".join(filter(None, (replace(subject, depth_tokens=None).label, cl)))


def _line_name(group: SeriesGroup) -> str:
    run = group.newest
    emulator = " (emulator)" if run.device.emulator else ""
    by = Subject.of(run).by
    return f"{container_name(run.container)} on {place(run)}{emulator}{by and f', {by}'}"


def _quality_figure(groups: Sequence[SeriesGroup], against: str) -> Figure | None:
    points = (point for group in groups for point in group.points)
    sizes = {point.sha256: point.size_bytes / _MIB for point in points if point.size_bytes}
    metric = find_metric("perplexity")
    rows: list[tuple[Value, ...]] = []
    for one in groups:
        point, run = _newest_with(one, "perplexity"), one.newest
        bits = _BITS.match(run.container.precision or "")
        x = None
        if point is not None and against == "bits":
            x = point.bits_per_weight or (float(bits[1]) if bits else None)
        elif point is not None:
            x = sizes.get(point.sha256)
        if point is not None and x is not None:
            scored = describe_scored(run.workload.perplexity)
            text = f"{(run.workload.dataset_sha256 or '')[:12]}, {scored}"
            rows.append((_line_name(one), text, x, point.values["perplexity"], point.at))
    if len({row[2] for row in rows}) < 2:
        return None
    title = "Bits per weight" if against == "bits" else "Size on the device, MiB"
    columns = (
        Column("line", "Model"),
        Column("text", "Text and windows"),
        Column("x", title, "number", 1),
        metric_column(metric),
        Column("at", "Measured (UTC)", "time"),
    )
    return Figure(
        f"perplexity-{against}",
        f"Perplexity against {'bits per weight' if against == 'bits' else 'size'}",
        "The newest result of each container; lower is better. Only perplexities of one text over "
        "the same windows can be compared."
        + (
            " Bits are those of all files of the container for each weight, or those of the linear "
            "layers where the number of weights is unknown."
            if against == "bits"
            else ""
        ),
        columns,
        tuple(sorted(rows, key=lambda row: (str(row[0]), row[2]))),
        _curve(columns, "x", title, metric_column(metric)),
    )


def _curve(
    columns: Sequence[Column], x: str, title: str, y: Column, lengths: Sequence[int] = ()
) -> Spec:
    """Draw lines over lengths, whose ticks are powers of two; without lengths, points."""
    scale: dict[str, object] = {}
    axis: dict[str, object] = {}
    if lengths:
        least, most = min(filter(None, lengths)), max(lengths)
        powers = [n for n in (2**e for e in range(most.bit_length())) if least <= n]
        scale = {"type": "log", "base": 2, "nice": False}
        if 0 in lengths:
            scale = {"type": "symlog", "constant": least, "nice": False}
            powers = [0, *powers]
        axis = {"format": ",d", "values": powers}
    mark = {"type": "line", "point": {"size": 60}} if lengths else {"type": "point", "size": 80}
    return {
        "width": "container",
        "height": CURVE_HEIGHT,
        "mark": mark,
        "encoding": {
            "x": quantity(x, title, scale=scale, axis=axis),
            "y": quantity(y.key, y.label, zero=bool(lengths)),
            "color": shade("line"),
            "tooltip": tooltips(columns),
        },
    }


def repetitions_figure(run: Run) -> Figure | None:
    """Draw the repetitions of a run in their order, warm-ups first; None if it has only one."""
    keys = {m.metric for m in run.measurements}
    metrics = [find_metric(k) for k in JUDGED_METRICS if k in keys]
    numbered = sorted({(not m.is_warmup, m.repetition) for m in run.measurements})
    value_of = {(m.metric, not m.is_warmup, m.repetition): m.value for m in run.measurements}
    metrics = [m for m in metrics if sum((m.key, *n) in value_of for n in numbered) > 1]
    if not metrics:
        return None
    columns = (
        Column("number", "Repetition", "number", 0),
        Column("kind", "Kind"),
        *map(metric_column, metrics),
    )
    rows = tuple(
        (
            float(index + 1),
            "repetition" if is_measured else "warm-up",
            *(shown(m, value_of.get((m.key, is_measured, number))) for m in metrics),
        )
        for index, (is_measured, number) in enumerate(
            n for n in numbered if any((m.key, *n) in value_of for m in metrics)
        )
    )
    return Figure(
        f"repetitions-{run.id}",
        "Repetitions",
        "In the order in which they ran; hollow points are warm-ups, which no mean includes.",
        columns,
        rows,
        lanes(_repetition_lane(metric_column(m), columns, last=m is metrics[-1]) for m in metrics),
    )


def _repetition_lane(column: Column, columns: Sequence[Column], *, last: bool) -> Spec:
    axis = {"tickMinStep": 1, "labels": last, "ticks": last}
    y = quantity(column.key, column.label, zero=True)
    return {
        "width": "container",
        "height": 90,
        "encoding": {"x": quantity("number", "Repetition" if last else "", axis=axis), "y": y},
        "layer": [
            {"mark": {"type": "line", "opacity": 0.4}},
            {
                "mark": {"type": "point", "size": 55},
                "encoding": {
                    "fill": {
                        "condition": {"test": "datum.kind === 'warm-up'", "value": "transparent"},
                        "value": {"expr": "accent"},
                    },
                    "tooltip": tooltips(columns),
                },
            },
        ],
    }


def beside_figure(a: Run, b: Run) -> Figure:
    """Put two runs side by side: their means, and everything else in which they differ."""
    columns = (
        Column("what", "Metric or setting"),
        Column("a", f"A, {a.id[:8]}"),
        Column("b", f"B, {b.id[:8]}"),
        Column("ratio", "B over A", "number", 3),
    )
    means = (RunMeans.of(a).means, RunMeans.of(b).means)
    rows: list[tuple[Value, ...]] = []
    for key, metric in METRICS.items():
        x, y = (side.get(key) for side in means)
        if x is not None or y is not None:
            texts = (None if value is None else metric.show(value) for value in (x, y))
            rows.append((metric.label, *texts, y / x if x and y else None))
    x_facts, y_facts = dict(_flat(a)), dict(_flat(b))
    rows += [
        (key, x_facts.get(key), y_facts.get(key), None)
        for key in dict.fromkeys((*x_facts, *y_facts))
        if x_facts.get(key) != y_facts.get(key)
    ]
    return Figure("beside", "Two runs side by side", "", columns, tuple(rows))


def _flat(run: Run) -> Iterable[tuple[str, str]]:
    """Return the settings and facts of a run by name, as text."""
    left_out = {"id", "measurements", "generated_text", "conditions"}
    for key, value in run.model_dump(mode="json", exclude=left_out).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for name, part in parts:
            for inner, one in part.items() if isinstance(part, dict) else [("", part)]:
                path = " ".join(filter(None, (key, name, str(inner)))).replace("_", " ")
                if one is not None and one != "":
                    yield path, str(one)
