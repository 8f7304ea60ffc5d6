"""Plots of repetitions: one lane for each run, one point for each repetition.

Positions along the value axis are percentages, so that a plot fits any width while its text keeps
its size. Within a lane time runs downwards: a lane that leans shows drift.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.results import stats
from harness.results.identity import SpeedKey
from harness.results.metrics import Metric, find_metric
from harness.results.records import Run
from reports.summary import SPEED_METRICS

MOST_LANES = 24
"""Only the newest runs are plotted; all of them are listed."""
_LANE_TOP_PX = 9
_STEP_PX = 8
_MOST_STEPS = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One repetition: `x` in percent of the axis, `y` in pixels of the lane."""

    x: float
    y: float
    title: str
    is_warmup: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """One run.

    Attributes:
        workload: with the side of a comparison, and the container if the plot has several of one
            model on one SoC.
    """

    run: Run
    workload: str
    points: tuple[Point, ...]
    mean_x: float | None
    text: str
    height: int


@dataclass(frozen=True, slots=True)
class Tick:
    """One mark of the value axis: `x` in percent."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """All plotted runs of one metric.

    Attributes:
        left_out: number of older runs that are not plotted.
    """

    metric: Metric
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    left_out: int


def plots(runs: Sequence[Run]) -> tuple[Plot, ...]:
    """Plot each speed metric of the runs, which are all on hardware or all on the emulator."""
    found = (_plot(find_metric(key), runs) for key in SPEED_METRICS)
    return tuple(plot for plot in found if plot.lanes)


def _plot(metric: Metric, runs: Sequence[Run]) -> Plot:
    measured = [run for run in runs if _values(run, metric)]
    shown = measured[-MOST_LANES:]
    highest = max((value for run in shown for _, value in _values(run, metric)), default=0.0)
    step = _nice_step(highest * metric.scale)
    top = max(math.ceil(highest * metric.scale / step - 1e-9), 1) * step
    containers = {(run.container.sha256, _name(run)) for run in shown}
    alike = Counter(name for _, name in containers)
    ordered = sorted(shown, key=lambda run: (run.container.model, run.device.soc, run.created_at))
    return Plot(
        metric=metric,
        lanes=tuple(_lane(metric, run, top, apart=alike[_name(run)] > 1) for run in ordered),
        ticks=tuple(
            Tick(_percent(index * step, top), f"{index * step:,.10g}")
            for index in range(round(top / step) + 1)
        ),
        left_out=len(measured) - len(shown),
    )


def _name(run: Run) -> tuple[str, str]:
    """The name of a lane."""
    return (run.container.model, run.device.soc)


def _workload(run: Run, *, apart: bool) -> str:
    words = (SpeedKey.of(run).label, run.label, run.container.sha256[:12] if apart else "")
    return ", ".join(word for word in words if word)


def _lane(metric: Metric, run: Run, top: float, *, apart: bool) -> Lane:
    values = _values(run, metric)
    rows = min(len(values), _MOST_STEPS)
    gap = 0.0 if len(values) < 2 else _STEP_PX * (rows - 1) / (len(values) - 1)
    points = tuple(
        Point(
            x=_percent(value * metric.scale, top),
            y=round(_LANE_TOP_PX + index * gap, 2),
            title=_title(metric, index, value, is_warmup=is_warmup, run=run),
            is_warmup=is_warmup,
        )
        for index, (is_warmup, value) in enumerate(values)
    )
    found = stats.summarise([run.values(metric.key)])
    return Lane(
        run=run,
        workload=_workload(run, apart=apart),
        points=points,
        mean_x=None if found is None else _percent(found.mean * metric.scale, top),
        text="warm-up only" if found is None else found.show(metric),
        height=2 * _LANE_TOP_PX + _STEP_PX * (rows - 1),
    )


def _values(run: Run, metric: Metric) -> list[tuple[bool, float]]:
    """Warm-ups, then measured repetitions, as pairs of `is_warmup` and value."""
    warmups = [(True, value) for value in run.values(metric.key, warmup=True)]
    return warmups + [(False, value) for value in run.values(metric.key)]


def _title(metric: Metric, index: int, value: float, *, is_warmup: bool, run: Run) -> str:
    if is_warmup:
        return f"warm-up {index + 1}: {metric.show(value)}"
    warmups = len(run.values(metric.key, warmup=True))
    return f"repetition {index + 1 - warmups}: {metric.show(value)}"


def _percent(value: float, top: float) -> float:
    return round(100 * value / top, 3)


def _nice_step(highest: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts the axis into two to five parts."""
    if highest <= 0:
        return 1.0
    raw = highest / 4
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if raw <= factor * power * (1 + 1e-9))
