"""Device health: use, heat and failures of each device, from its results and its pool's ledger."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from buildlib.entry_points import entry_names, load_entry
from harness.results.device_health import DOOR, DeviceEvent, DeviceHealth
from harness.results.history import Series
from harness.results.identity import Subject, container_name, device_name, place
from harness.results.metrics import LEADING_METRICS, find_metric
from harness.results.nights import LONGEST, PAUSE
from harness.results.records import RepetitionTelemetry, Run, RunMeans
from harness.results.stability import THROTTLING, start_temperature, was_throttled
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
from reports.text import day

QUARANTINE, FAILURE, GRANT = "distrusted", "failed", "granted"
"""Kinds of events of the pool's ledger."""
POOL_WORDS = {FAILURE: "failed in the pool", QUARANTINE: "quarantined"}
MOST_EVENTS = 50
MOST_DAYS = 120
MOST_HEATED = 24
"""Devices whose newest night is drawn: those that throttled, and the most recently used ones."""
_COLORS = ("accent", "bad", "warn", "ink")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Use of one device.

    Attributes:
        busy_s: time in runs that have ended.
        health: by the pool; None if it does not know the device.
    """

    serial: str
    kind: str
    soc: str
    emulator: bool
    runs: int
    failed: int
    interrupted: int
    busy_s: float
    first: datetime | None
    last: datetime | None
    last_error: str
    health: DeviceHealth | None

    def tally(self, what: str) -> int:
        """Count the pool's events of a kind."""
        events = self.health.events if self.health else ()
        return sum(event.what == what for event in events)

    @property
    def events(self) -> tuple[DeviceEvent, ...]:
        """The newest events of the pool, newest first."""
        return tuple(reversed(self.health.events[-MOST_EVENTS:])) if self.health else ()


def read_device_health(pool: Path | None) -> tuple[DeviceHealth, ...]:
    """Ask the installed packages that know a pool."""
    devices: list[DeviceHealth] = []
    for name in entry_names(DOOR):
        devices += load_entry(DOOR, name)(pool)
    return tuple(devices)


def find_device_use(
    measured: Iterable[RunMeans], devices: Sequence[DeviceHealth]
) -> tuple[DeviceUse, ...]:
    """Sum up the runs of each device, and add the devices that only the pool knows."""
    groups: dict[str, list[Run]] = {}
    for one in measured:
        groups.setdefault(one.run.device.serial, []).append(one.run)
    health_of = {serial: device for device in devices for serial in (device.name, *device.serials)}
    uses = [_use(serial, runs, health_of.get(serial)) for serial, runs in groups.items()]
    with_runs = {id(use.health) for use in uses if use.health}
    uses += [_unused(device) for device in devices if id(device) not in with_runs]
    return tuple(sorted(uses, key=_order))


def _use(serial: str, runs: Sequence[Run], health: DeviceHealth | None) -> DeviceUse:
    count = Counter(run.status for run in runs)
    errors = [run.error for run in runs if run.error]
    last = runs[-1]
    return DeviceUse(
        serial,
        device_name(last),
        last.device.soc,
        last.device.emulator,
        len(runs),
        count["failed"],
        count["interrupted"],
        sum((r.finished_at - r.created_at).total_seconds() for r in runs if r.finished_at),
        runs[0].created_at,
        last.created_at,
        errors[-1] if errors else "",
        health,
    )


def _unused(device: DeviceHealth) -> DeviceUse:
    return DeviceUse(device.name, "", "", False, 0, 0, 0, 0.0, None, None, "", device)  # noqa: FBT003


def _order(use: DeviceUse) -> tuple[object, ...]:
    """Return a sort key by which devices that need somebody come first."""
    state = use.health.state if use.health else ""
    return (state in {"", "ready", "leased"}, -(use.failed + use.interrupted), use.serial)


def device_figures(measured: Sequence[RunMeans], uses: Sequence[DeviceUse]) -> tuple[Figure, ...]:
    """Draw the runs of each device by day, with and without a result."""
    days: Counter[tuple[str, datetime, str]] = Counter()
    for one in measured:
        day = one.run.created_at.replace(hour=0, minute=0, second=0, microsecond=0)
        result = "done" if one.run.status == "done" else "without a result"
        days[one.run.device.serial, day, result] += 1
    for use in uses:
        for event in use.health.events if use.health else ():
            day = event.at.replace(hour=0, minute=0, second=0, microsecond=0)
            if event.what in POOL_WORDS:
                days[use.serial, day, POOL_WORDS[event.what]] += 1
    newest = sorted({day for _, day, _ in days})[-MOST_DAYS:]
    rows: list[tuple[Value, ...]] = [
        (serial, day, result, float(number))
        for (serial, day, result), number in sorted(days.items())
        if number and day in newest
    ]
    if not rows:
        return ()
    columns = (
        Column("device", "Device"),
        Column("day", "Day (UTC)", "time"),
        Column("result", "Result"),
        Column("count", "Count", "number", 0),
    )
    seen = {row[2] for row in rows}
    colors = dict(zip(("done", "without a result", *POOL_WORDS.values()), _COLORS, strict=True))
    results = [result for result in colors if result in seen]
    shades = [{"expr": colors[result]} for result in results]
    return (
        Figure(
            "devices-days",
            "Runs and failures by day",
            "Runs of each device, and the failures and quarantines that the pool recorded.",
            columns,
            tuple(rows),
            {
                "width": "container",
                "height": {"step": 26},
                "mark": {"type": "circle", "opacity": 0.85},
                "encoding": {
                    "x": moment("day", axis={"tickCount": {"interval": "day", "step": 1}}),
                    "y": {"field": "device", "type": "nominal", "title": None},
                    "yOffset": {"field": "result", "type": "nominal", "scale": {"domain": results}},
                    "size": {
                        "field": "count",
                        "type": "quantitative",
                        "title": "Count",
                        "legend": None,
                        "scale": {"range": [20, 160]},
                    },
                    "color": shade("result", 2, scale={"domain": results, "range": shades}),
                    "tooltip": tooltips(columns),
                },
            },
        ),
    )


def heat_figures(
    measured: Sequence[RunMeans],
    series: Sequence[Series],
    telemetry: Mapping[str, Sequence[RepetitionTelemetry]],
) -> tuple[Figure, ...]:
    """Draw the newest night of each device, of those that throttled first: speeds beside heat."""
    nights: dict[str, list[Run]] = {}
    for run in (one.run for one in reversed(measured)):  # newest first
        night, at = nights.setdefault(run.device.serial, []), run.created_at
        if run.status == "done" and (
            not night or at > max(night[-1].created_at - PAUSE, night[0].created_at - LONGEST)
        ):
            night.append(run)
    hottest = sorted(
        filter(None, nights.values()), key=lambda night: -sum(map(was_throttled, night))
    )
    shown = hottest[:MOST_HEATED]
    shares = _shares(series, {run.id for night in shown for run in night})
    figures = (_heat_figure(night[::-1], shares, telemetry) for night in shown)
    return tuple(figure for figure in figures if figure is not None)


def _shares(series: Sequence[Series], runs: Iterable[str]) -> Mapping[tuple[str, str], float]:
    """Return the speeds of runs as percents of the median of their history, by run and metric."""
    wanted, shares = frozenset(runs), {}
    for one in series:
        if one.metric.key in LEADING_METRICS and not wanted.isdisjoint(one.run_ids):
            sessions = [session for night in one.nights for session in night.sessions]
            usual = statistics.median(session.value for session in sessions)
            for session in sessions:
                if session.head.id in wanted and usual:
                    shares[session.head.id, one.metric.key] = 100 * session.value / usual
    return shares


def _heat_figure(
    night: Sequence[Run],
    shares: Mapping[tuple[str, str], float],
    telemetry: Mapping[str, Sequence[RepetitionTelemetry]],
) -> Figure | None:
    """Draw a night of one device; None without two speeds, or without heat and charge."""
    night = [run for run in night if any((run.id, key) in shares for key in LEADING_METRICS)]
    rows: list[tuple[Value, ...]] = []
    for run in night:
        charge = next((c.get("after") for c in run.conditions if c.get("name") == "charge"), None)
        slowed = (c for c in run.conditions if c.get("name") == THROTTLING)
        reason = next((str(c.get("reason")) for c in slowed if c.get("outcome") == "seen"), None)
        rows.append(
            (
                run.created_at,
                f"{container_name(run.container)}, {Subject.of(run).label}",
                *(shares.get((run.id, key)) for key in LEADING_METRICS),
                start_temperature(run.conditions),
                max(_temperatures(telemetry.get(run.id, ())), default=None),
                float(charge) if isinstance(charge, int | float) else None,
                reason,
                run.id,
            )
        )
    speeds = [
        Column(key, f"{find_metric(key).label}, % of its median", "number", 1)
        for key in LEADING_METRICS
    ]
    heat = [
        Column("start_c", "Hottest zone at the start, °C", "number", 1),
        Column("highest_c", "Highest in the session, °C", "number", 1),
        Column("charge_percent", "Charge, %", "number", 0),
    ]
    columns = (
        Column("at", "Began (UTC)", "time"), Column("what", "Model and workload"), *speeds, *heat,
        Column("throttled", "Throttled"), Column("run", "Run"),
    )  # fmt: skip
    measured = {c.key for n, c in enumerate(columns) if any(row[n] is not None for row in rows)}
    if len(rows) < 2 or not measured & {*(column.key for column in heat), "throttled"}:
        return None
    drawn = [[one] for one in speeds] + [heat[:2], heat[2:]]
    shown = [found for lane in drawn if (found := [one for one in lane if one.key in measured])]
    run = night[-1]
    return Figure(
        f"heat-{re.sub('[^A-Za-z0-9]+', '-', run.device.serial)}",
        f"Night of {day(night[0].created_at)} on {run.device.serial} ({place(run)})",
        "Speeds of its sessions against the median of their histories, and the heat meanwhile. "
        "Red sessions throttled. Another night: qnnfarm report --night DATE.",
        columns,
        tuple(rows),
        lanes(_heat_lane(lane, columns[:-1], last=lane is shown[-1]) for lane in shown),
    )


def _temperatures(telemetry: Iterable[RepetitionTelemetry]) -> Iterator[float]:
    zones = (one for part in telemetry for one in part.series if one.channel.startswith("temp_c:"))
    yield from (value for zone in zones for value in zone.values if value is not None)


def _heat_lane(lane: Sequence[Column], columns: Sequence[Column], *, last: bool) -> Spec:
    """Draw one quantity over the night; of a second column, hollow points that are joined."""
    x = moment("at", axis={} if last else {"labels": False, "ticks": False})
    y = quantity(lane[0].key, lane[-1].label.replace("Highest in the session", "Hottest zone"))
    marks = [
        {
            "transform": [{"filter": f"isValid(datum['{column.key}'])"}],
            "mark": {"type": "line", "strokeWidth": 1, "point": {"filled": n == 0, "size": 40}},
            "encoding": {"y": {**y, "field": column.key}},
        }
        for n, column in enumerate(lane)
    ]
    slowed = {
        "transform": [{"filter": f"isValid(datum['{lane[-1].key}'])"}],
        "mark": {"type": "point", "strokeWidth": 2},
        "encoding": {
            "y": {**y, "field": lane[-1].key},
            "size": {"condition": {"test": "isValid(datum.throttled)", "value": 130}, "value": 0},
            "color": {"value": {"expr": "bad"}},
        },
    }
    return {
        "width": "container",
        "height": 110,
        "encoding": {"x": x, "color": shade("what"), "tooltip": tooltips(columns)},
        "layer": [*marks, slowed],
    }
