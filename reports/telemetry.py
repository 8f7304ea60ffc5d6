"""Plots of a run's telemetry over time: heat, clocks, memory, power.

The repetitions of a run stand side by side on one time axis. Positions are in thousandths of the
plot's width and height, so that a plot fits any width while its text keeps its size.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.results.records import RepetitionTelemetry, Run, TelemetrySeries

SIDE = 1000
"""Width and height of a plot in its own units."""
MOST_LINES = 6
MOST_POINTS = 240
"""Points of one line in one repetition; of more samples, the extremes are kept."""
_GAP = 0.02
_LEAST_SPAN = 1e-9


@dataclass(frozen=True, slots=True)
class Line:
    """One channel.

    Attributes:
        pieces: the points of each stretch without a gap, as SVG writes them.
        text: lowest and highest value, in the panel's unit.
    """

    channel: str
    pieces: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Band:
    """One repetition: where it stands on the time axis, in percent."""

    left: float
    width: float
    title: str
    text: str
    is_warmup: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """All plotted channels of one kind.

    Attributes:
        left_out: number of channels that are not plotted.
    """

    title: str
    unit: str
    low: str
    high: str
    lines: tuple[Line, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class TelemetryFigure:
    """One run."""

    run: Run
    bands: tuple[Band, ...]
    panels: tuple[Panel, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Kind:
    title: str
    unit: str
    scale: float
    prefixes: tuple[str, ...]
    decimals: int = 1


_KINDS = (
    _Kind("Temperature", "°C", 1.0, ("temp_c",)),
    _Kind("Clocks", "MHz", 1e-6, ("cpu_hz", "ddr_hz", "gpu_hz"), 0),
    _Kind("Clock limits", "MHz", 1e-6, ("cpu_cap_hz",), 0),
    _Kind("Memory", "MiB", 1 / 2**20, ("rss_bytes",)),
    _Kind("Battery power", "W", 1.0, ("battery_w",), 2),
)


@dataclass(frozen=True, slots=True)
class _Placed:
    """One repetition on the axis."""

    start_s: float
    offset_s: float
    series: tuple[TelemetrySeries, ...]


def figure(run: Run, telemetry: Sequence[RepetitionTelemetry]) -> TelemetryFigure | None:
    """Plot the telemetry of one run; None if there is nothing to plot."""
    placed, bands, total = _place(telemetry)
    panels = tuple(
        panel for kind in _KINDS for panel in [_panel(kind, placed, total)] if panel is not None
    )
    return TelemetryFigure(run, bands, panels, total) if panels else None


def _place(
    telemetry: Sequence[RepetitionTelemetry],
) -> tuple[list[_Placed], tuple[Band, ...], float]:
    spans = []
    for one in telemetry:
        moments = [(s.t_s[0], s.t_s[-1]) for s in one.series if s.t_s]
        if moments:
            start = min(first for first, _ in moments)
            spans.append((one, start, max(last for _, last in moments) - start))
    total = sum(length for _, _, length in spans)
    if total <= 0:
        return [], (), 0.0
    gap = _GAP * total
    axis = total + gap * (len(spans) - 1)
    placed, bands, offset = [], [], 0.0
    for one, start, length in spans:
        placed.append(_Placed(start, offset, _with_power(one.series)))
        name = "warm-up" if one.is_warmup else "repetition"
        title = f"{name} {one.repetition + 1}, {length:.1f} s"
        left, width = 100 * offset / axis, 100 * length / axis
        bands.append(Band(round(left, 3), round(width, 3), title, f"{length:.0f} s", one.is_warmup))
        offset += length + gap
    return placed, tuple(bands), axis


def _with_power(series: tuple[TelemetrySeries, ...]) -> tuple[TelemetrySeries, ...]:
    """Add power, if current and voltage were sampled together.

    Makers disagree on the sign of a current, so only its size counts.
    """
    found = {one.channel: one for one in series}
    current, voltage = found.get("battery_a"), found.get("battery_v")
    if current is None or voltage is None or current.t_s != voltage.t_s:
        return series
    power = tuple(
        None if a is None or v is None else abs(a * v)
        for a, v in zip(current.values, voltage.values, strict=True)
    )
    return (*series, TelemetrySeries("battery_w", "W", current.t_s, power))


def _panel(kind: _Kind, placed: Sequence[_Placed], total: float) -> Panel | None:
    channels: dict[str, list[tuple[_Placed, TelemetrySeries]]] = {}
    for one in placed:
        for series in one.series:
            wanted = series.channel.partition(":")[0] in kind.prefixes
            if wanted and any(value is not None for value in series.values):
                channels.setdefault(series.channel, []).append((one, series))
    if not channels:
        return None
    ranked = sorted(channels, key=lambda name: (-_interest(channels[name]), name))
    shown = sorted(ranked[:MOST_LINES])
    values = [value for name in shown for _, s in channels[name] for value in _numbers(s)]
    low, high = _rounded(min(values) * kind.scale, max(values) * kind.scale)
    return Panel(
        kind.title,
        kind.unit,
        f"{low:,.{kind.decimals}f}",
        f"{high:,.{kind.decimals}f}",
        tuple(_line(kind, name, channels[name], total, (low, high)) for name in shown),
        len(ranked) - len(shown),
    )


def _interest(parts: Iterable[tuple[_Placed, TelemetrySeries]]) -> float:
    """Rank channels that change, or are high: a zone that heats up, a core that works."""
    values = [value for _, series in parts for value in _numbers(series)]
    return 2 * (max(values) - min(values)) + max(values)


def _line(
    kind: _Kind,
    channel: str,
    parts: Sequence[tuple[_Placed, TelemetrySeries]],
    total: float,
    span: tuple[float, float],
) -> Line:
    low, high = span
    pieces = []
    for one, series in parts:
        for piece in _pieces(series):
            points = [
                (
                    SIDE * (moment - one.start_s + one.offset_s) / total,
                    SIDE * (1 - (value * kind.scale - low) / (high - low)),
                )
                for moment, value in piece
            ]
            if len(points) == 1:
                points.append((points[0][0] + 2, points[0][1]))
            pieces.append(" ".join(f"{x:.1f},{y:.1f}" for x, y in points))
    values = [value * kind.scale for _, series in parts for value in _numbers(series)]
    text = f"{min(values):,.{kind.decimals}f} to {max(values):,.{kind.decimals}f}"
    return Line(channel, tuple(pieces), text)


def _pieces(series: TelemetrySeries) -> list[list[tuple[float, float]]]:
    """Stretches without a missing value, thinned to their extremes."""
    stretches: list[list[tuple[float, float]]] = []
    pairs = zip(series.t_s, series.values, strict=True)
    for missing, group in itertools.groupby(pairs, key=lambda pair: pair[1] is None):
        if not missing:
            stretches.append([(moment, value) for moment, value in group if value is not None])
    width = max(1, math.ceil(2 * len(series.t_s) / MOST_POINTS))
    return [_thinned(stretch, width) for stretch in stretches]


def _thinned(points: list[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    if width == 1:
        return points
    kept = []
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        extremes = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def _numbers(series: TelemetrySeries) -> list[float]:
    return [value for value in series.values if value is not None]


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Ends of the value axis: round numbers around the values.

    Differences within floating-point error count as none.
    """
    size = max(abs(low), abs(high))
    width = high - low if high - low > _LEAST_SPAN * size else size or 1.0
    step: float = 10.0 ** math.floor(math.log10(width))
    below, above = math.floor(low / step) * step, math.ceil(high / step) * step
    return (below, above) if above > below else (below, below + step)
