"""Device health: use and failures of each device, from its results and from the pool's ledger."""

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.results.device_health import ENTRY_POINTS, DeviceEvent, DeviceHealth
from harness.results.identity import device_name
from harness.results.records import Run, RunMeans
from reports.figures import Column, Figure, Value, moment, tooltips

QUARANTINE, FAILURE, GRANT = "distrusted", "failed", "granted"
"""Kinds of events of the pool's ledger."""
POOL_WORDS = {FAILURE: "failed in the pool", QUARANTINE: "quarantined"}
MOST_EVENTS = 50
MOST_DAYS = 120


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
        return sum(event.tally.get(what, 0) for event in events)

    @property
    def events(self) -> tuple[DeviceEvent, ...]:
        """The newest events of the pool, newest first."""
        return tuple(reversed(self.health.events[-MOST_EVENTS:])) if self.health else ()


def read_device_health(pool: Path | None) -> tuple[DeviceHealth, ...]:
    """Ask the installed packages that know a pool."""
    devices: list[DeviceHealth] = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        devices += entry.load()(pool)
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
            for what in (FAILURE, QUARANTINE):
                days[use.serial, day, POOL_WORDS[what]] += event.tally.get(what, 0)
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
    results = ["done", "without a result", *POOL_WORDS.values()]
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
                    "x": moment("day"),
                    "y": {"field": "device", "type": "nominal", "title": None},
                    "yOffset": {"field": "result", "type": "nominal", "scale": {"domain": results}},
                    "size": {
                        "field": "count",
                        "type": "quantitative",
                        "title": "Count",
                        "legend": None,
                        "scale": {"range": [20, 160]},
                    },
                    "color": {
                        "field": "result",
                        "type": "nominal",
                        "title": None,
                        "legend": {"orient": "bottom"},
                        "scale": {
                            "domain": results,
                            "range": [
                                {"expr": "accent"},
                                {"expr": "bad"},
                                {"expr": "warn"},
                                {"expr": "ink"},
                            ],
                        },
                    },
                    "tooltip": tooltips(columns),
                },
            },
        ),
    )
