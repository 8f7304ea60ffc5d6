"""Board: a pool, its running runs and the verdict over its results, at one moment."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from buildlib.closeable import Closeable
from buildlib.error_base import QnnfarmError
from harness.errors import MissingStoreError
from harness.pool.pool import Pool
from harness.pool.requirement import MemberStatus, Waiting
from harness.results.alerts import UNSETTLED, Alert
from harness.results.metrics import find_metric
from harness.results.records import RepetitionTelemetry, Run
from harness.results.store import ResultsStore, RunFilter
from plugins.lab.overview import Overview
from reports import html_file, page, site_folder
from reports.headline import Headline
from reports.history import find_runs_before
from reports.page import Page

_SPEEDS = ("decode_tokens_per_s", "prefill_tokens_per_s", "total_tokens_per_s")
"""Metrics that say how fast a run goes, the most telling first."""
_TEMPERATURE = "temp_c:"
_NEED_SOMEBODY = frozenset({"quarantined", "absent", "recovering", "probation", "draining"})
_UNREAD = Headline("none", "Reading the results", ())
_NO_RESULTS = Headline("none", "No results yet", ("`qnnfarm bench` adds some.",))
_NO_LAB = Overview()
_COMPOSE_EVERY_S = 30.0
"""A report of many runs takes seconds to compose, and a plan ends a run every minute."""
_MOST_TELEMETRY = 200


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run that goes on.

    Attributes:
        repetitions: those that have ended, warm-ups apart.
        metric, value: speed of the newest repetition, in tokens/s; `None` before one has ended.
        temperature_c: of the hottest zone at the end of that repetition.
    """

    run: Run
    repetitions: int
    metric: str
    value: float | None
    temperature_c: float | None

    @property
    def speed(self) -> str:
        """The speed in words; empty before a repetition has ended."""
        if self.value is None:
            return ""
        metric = find_metric(self.metric)
        return f"{metric.label.lower()} {metric.show(self.value)}"


@dataclass(frozen=True, slots=True)
class Report:
    """The report over all results, composed at one moment.

    Attributes:
        composed: `None` before it was composed, or where there are no results.
        files: the site's content by name, but for the pages of runs.
    """

    headline: Headline = _UNREAD
    alerts: tuple[Alert, ...] = ()
    at: datetime | None = None
    composed: Page | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Board:
    """A lab at one moment.

    Attributes:
        at: seconds since 1970.
        devices: in the order of the pool.
        lab: the hosts that share the results, and the plans that they run.
        temperatures: degrees Celsius of the hottest zone when a device was last measured, by the
            serial under which results know it.
        trouble: why the pool or the results cannot be read, a line each.
    """

    at: float
    report: Report = Report()
    devices: tuple[MemberStatus, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    running: tuple[RunningRun, ...] = ()
    lab: Overview = _NO_LAB
    temperatures: Mapping[str, float] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[MemberStatus, ...]:
        """The devices that need somebody."""
        return tuple(
            device
            for device in self.devices
            if device.state in _NEED_SOMEBODY and not device.is_unsure
        )

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The losses that nobody has settled."""
        return tuple(alert for alert in self.report.alerts if alert.state in UNSETTLED)

    def temperature(self, device: MemberStatus) -> float | None:
        """Return the temperature of a device when it was last measured."""
        names = (device.spec.serial, device.spec.identifier, str(device.spec), device.name)
        return next((self.temperatures[n] for n in names if n in self.temperatures), None)


class BoardReader(Closeable):
    """Reads boards. Thread-safe; the report is composed in a thread of its own.

    Args:
        pool: closed with it.
        location: of the results, which need not be there yet.
    """

    def __init__(self, pool: Pool, location: str) -> None:
        self.pool = pool
        self.location = location
        self._opened: ResultsStore | None = None
        self._report = Report()
        self._mark: object = None
        self._due = 0.0
        self._composing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._temperatures: dict[str, tuple[str, float]] = {}

    def close(self) -> None:
        """Close the pool and the results."""
        if self._composing is not None:
            self._composing.join()
        if self._opened is not None:
            self._opened.close()
        self.pool.close()

    def read(self) -> Board:
        """Read the lab as it is now. No device is asked."""
        trouble: list[str] = []
        devices: tuple[MemberStatus, ...] = ()
        queue: tuple[Waiting, ...] = ()
        runs: tuple[RunningRun, ...] = ()
        lab = Overview()
        try:
            devices, queue = tuple(self.pool.overview()), tuple(self.pool.waiting())
        except QnnfarmError as error:
            trouble.append(str(error))
        try:
            runs = self._read_results()
            if not self.store().database.is_file:
                with self.store().database.reading() as connection:
                    lab = Overview.read(connection)
        except MissingStoreError:
            self._report = Report(_NO_RESULTS)
        except QnnfarmError as error:
            trouble.append(str(error))
        temperatures = {serial: value for serial, (_, value) in self._temperatures.items()}
        temperatures |= {
            one.run.device.serial: one.temperature_c
            for one in runs
            if one.temperature_c is not None
        }
        return Board(
            time.time(), self._report, devices, queue, runs, lab, temperatures, tuple(trouble)
        )

    def store(self) -> ResultsStore:
        """Return the results, opened for reading."""
        with self._lock:
            if self._opened is None:
                self._opened = ResultsStore.open(self.location, create=False)
            return self._opened

    def compose_again(self) -> None:
        """Compose the report at the next reading, even without a change."""
        self._mark, self._due = None, 0.0

    def run_page(self, run_id: str) -> str:
        """Render the page of a run of the report's site."""
        composed, store = self._report.composed, self.store()
        run = store.get_run(run_id)
        if composed is None:
            composed = page.compose(page.load(self.location))
        earlier = find_runs_before(composed.results.groups, {run_id}).get(run_id)
        before = store.get_run(earlier) if earlier else None
        return site_folder.render_run(composed, store, run, before, datetime.now(UTC))[1]

    def _read_results(self) -> tuple[RunningRun, ...]:
        store = self.store()
        with self._lock:
            mark = store.mark()
            idle = self._composing is None or not self._composing.is_alive()
            if mark != self._mark and idle and time.monotonic() >= self._due:
                self._mark, self._due = mark, time.monotonic() + _COMPOSE_EVERY_S
                self._composing = threading.Thread(target=self._compose, args=(store,), daemon=True)
                self._composing.start()
        runs = store.list_runs(RunFilter(status="running"))
        return tuple(_running(run, store.telemetry(run.id)) for run in reversed(runs))

    def _compose(self, store: ResultsStore) -> None:
        now = datetime.now(UTC)
        try:
            composed = page.compose(page.load(self.location))
            files = dict(html_file.render_site(composed, now))
            self._report = Report(composed.headline, composed.results.alerts, now, composed, files)
            self._read_temperatures(store, composed)
        except QnnfarmError as error:
            lines = (f"the report cannot be composed: {error}",)
            self._report = Report(Headline("doubt", "No verdict", lines), at=now)

    def _read_temperatures(self, store: ResultsStore, composed: Page) -> None:
        with_telemetry = store.newest_with_telemetry(_MOST_TELEMETRY)
        newest = {
            one.run.device.serial: one.run.id
            for one in composed.results.measured
            if one.run.id in with_telemetry
        }
        for serial, run_id in newest.items():
            last = self._temperatures.get(serial)
            if last is None or last[0] != run_id:
                value = _hottest(store.telemetry(run_id))
                if value is not None:
                    self._temperatures[serial] = run_id, value


def _running(run: Run, telemetry: tuple[RepetitionTelemetry, ...]) -> RunningRun:
    speeds = ((key, run.values(key) or run.values(key, warmup=True)) for key in _SPEEDS)
    metric, values = next(((key, series) for key, series in speeds if series), ("", ()))
    repetitions = len({m.repetition for m in run.measurements if not m.is_warmup})
    value = values[-1] if values else None
    return RunningRun(run, repetitions, metric, value, _hottest(telemetry))


def _hottest(telemetry: tuple[RepetitionTelemetry, ...]) -> float | None:
    """Return the last temperature of the hottest zone; `None` where no zone was sampled."""
    newest = telemetry[-1].series if telemetry else ()
    zones = (one.values for one in newest if one.channel.startswith(_TEMPERATURE))
    last = (next((v for v in reversed(values) if v is not None), None) for values in zones)
    return max((value for value in last if value is not None), default=None)
