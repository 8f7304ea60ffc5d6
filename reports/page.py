"""The page of a report, before it becomes HTML, JSON or terminal output."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import date, datetime

from harness.errors import ArtifactError
from harness.results.alerts import Alert, assess, list_alerts
from harness.results.comparison import find_comparisons
from harness.results.device_health import DeviceHealth
from harness.results.gate import Gate, GateOptions, judge_gate
from harness.results.history import Series, find_series
from harness.results.identity import place
from harness.results.metrics import BRIEF_METRICS, find_metric
from harness.results.nights import group_nights
from harness.results.records import (
    SIDES,
    ArtifactRecord,
    RepetitionTelemetry,
    Run,
    RunHead,
    RunMeans,
)
from harness.results.store import EVERYTHING, ResultsStore, RunFilter, without_collection
from harness.results.timeline import build_timeline, read_traces
from harness.words import HOST_CPU, pluralize, stand_in
from reports import charts, summary, text
from reports.changes import ShownChange, find_changes
from reports.content import TITLES, KeptFiles, Kind, Results, Section, list_runs
from reports.devices import DeviceUse, device_figures, find_device_use, heat_figures
from reports.errors import ReportError
from reports.figures import Figure
from reports.headline import RECENT, Headline, judge_page
from reports.history import find_present, find_runs_before, group_series
from reports.summary import FailureGroup
from reports.timeline import timeline_figure, trace_address

MOST_NAMES = 3
MOST_TIMELINES = 24
"""Runs whose telemetry is read, the newest ones: it is by far the largest part of a store."""
LOG_BYTES = 4000
"""The end of a log that a report shows."""
MOST_PRESENT = 1000
"""Sessions behind the summary, the newest ones."""


@dataclass(frozen=True, slots=True)
class RunPage:
    """A run with its figures.

    Attributes:
        before: the run before it in the same series, to stand beside.
        kept: the files that are kept with it.
    """

    run: Run
    repetitions: Figure | None
    timeline: Figure | None
    trace: str | None
    before: Run | None
    kept: KeptFiles

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Its figures."""
        return tuple(one for one in (self.timeline, self.repetitions) if one is not None)


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    results: Results
    title: str
    lead: str
    headline: Headline
    sections: tuple[Section, ...]
    histories: tuple[Figure, ...]
    curves: tuple[Figure, ...]
    run_pages: tuple[RunPage, ...]
    device_use: tuple[DeviceUse, ...]
    device_figures: tuple[Figure, ...]

    @property
    def failures(self) -> tuple[FailureGroup, ...]:
        """The runs without a result, those that ended alike together."""
        return summary.group_failures(self.results.gaps)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures."""
        own = (figure for page in self.run_pages for figure in page.figures)
        return (*self.histories, *self.curves, *self.device_figures, *own)

    @property
    def has_emulator(self) -> bool:
        """True where any run was on the emulator."""
        return any(one.run.device.emulator for one in self.results.measured)

    @property
    def has_host_cpu(self) -> bool:
        """True where any run was on the CPU of a virtual device's host."""
        runs = (one.run for one in self.results.measured)
        return any(
            run.device.emulator and stand_in(run.workload.runtime) == HOST_CPU for run in runs
        )

    @property
    def has_hardware(self) -> bool:
        """True where any run was on hardware."""
        return any(not one.run.device.emulator for one in self.results.measured)


def load(
    location: str,
    wanted: RunFilter = EVERYTHING,
    devices: Sequence[DeviceHealth] = (),
    baseline: str = "",
    night: date | None = None,
) -> Results:
    """Read the means of the selected runs, and the runs that the report shows in full.

    Args:
        baseline: of the newest results, as `qnnfarm gate` takes it; empty for none.
        night: the report is that of the morning after, of the nights that began on this date.

    Raises:
        StoreError: there is no such store, or it cannot be read.
        NotStoredError: it has no results of the baseline.
    """
    with ResultsStore.open(location, create=False) as store, without_collection():
        all_means, heads = store.measured(), store.heads()
        known_alerts = list_alerts(store)
        if night is not None:
            since, until = _find_night(heads, night)
            wanted = replace(wanted, since=since)
            all_means = tuple(one for one in all_means if one.run.created_at <= until)
            known_alerts = tuple(one for one in known_alerts if one.began_at <= until)
        # Whatever is shown of a history, the whole is judged.
        means = tuple(one for one in all_means if wanted.matches(one.run))
        runs = [one.run for one in means]
        ids = {run.id for run in runs}
        judged = find_series(all_means, heads)
        series = tuple(one for one in judged if not ids.isdisjoint(one.run_ids))
        groups = group_series([one.since(wanted.since) for one in series], all_means)
        listing = list_runs(runs)
        present = find_present(groups, runs)
        newest = [run.id for run in runs if run.id in present or run.label in SIDES]
        full_ids = [run.id for run in listing.full]
        timed = store.newest_with_telemetry(MOST_TIMELINES, ids)
        full = store.get_runs(sorted({*newest[-MOST_PRESENT:], *full_ids, *timed}))
        # A window hides no loss, also of a history that ended before it.
        whole = replace(wanted, since=None) == EVERYTHING
        alerts = _alerts(known_alerts, judged if whole else series, whole=whole)
        return Results(
            store.location.rstrip("/").rpartition("/")[2],
            means,
            groups,
            series,
            listing,
            full,
            alerts,
            _gate(store, baseline, wanted, ids, alerts) if baseline else None,
            {run.id: store.telemetry(run.id) for run in runs if run.id in timed},
            store.comparisons(),
            store.location,
            tuple(devices),
            {
                run_id: read_kept(store, kept)
                for run_id, kept in store.artifacts_of(full_ids).items()
            },
        )


def _find_night(heads: Sequence[RunHead], night: date) -> tuple[datetime, datetime]:
    """Return the first and the last run of the nights that began on a date."""
    nights = group_nights(heads)
    ends = [one for one in nights if one[0].created_at.date() == night]
    if not ends:
        days = sorted(
            {one[0].created_at.date() for one in nights}, key=lambda day: abs(day - night)
        )
        others = f"; the nearest one began on {days[0]}" if days else ""
        raise ReportError(f"no night began on {night} (UTC){others}")
    return ends[0][0].created_at, max(one[-1].created_at for one in ends)


def _alerts(known: Sequence[Alert], series: Sequence[Series], *, whole: bool) -> tuple[Alert, ...]:
    """Return the alerts of the histories that are shown; of all histories, if all runs are."""
    series_ids = {one.id for one in series}
    return assess(series, [one for one in known if whole or one.series in series_ids])


def _gate(
    store: ResultsStore,
    baseline: str,
    wanted: RunFilter,
    shown: AbstractSet[str],
    alerts: Sequence[Alert],
) -> Gate:
    """Judge the newest results, and keep the cells of the runs that are shown."""
    judged = judge_gate(store, baseline, options=GateOptions(plan=wanted.plan or ""), alerts=alerts)
    if replace(wanted, plan=None) == EVERYTHING:
        return judged
    return replace(judged, cells=tuple(c for c in judged.cells if not shown.isdisjoint(c.runs)))


def read_kept(store: ResultsStore, artifacts: tuple[ArtifactRecord, ...]) -> KeptFiles:
    """Read the parts of a run's files that its page shows."""
    logs = []
    for artifact in artifacts:
        if artifact.kind == "log":
            try:
                end = store.read_artifact(artifact)[-LOG_BYTES:]
            except ArtifactError as error:
                end = str(error).encode()
            logs.append((artifact.name, end.decode(errors="replace")))
    return KeptFiles(artifacts, tuple(logs), read_traces(store, artifacts))


def compose(results: Results) -> Page:
    """Compose the page of the results."""
    changes = find_changes(results.series, results.alerts)
    present = find_present(results.groups, [one.run for one in results.measured])
    sections = tuple(
        section
        for key in TITLES
        for section in [_section(results, present, changes, key)]
        if section.rows or section.perplexities or section.tasks or section.changes
    )
    use = find_device_use(results.measured, results.devices)
    return Page(
        results=results,
        title=_title([one.run for one in results.measured]),
        lead=_lead(results),
        headline=judge_page(results, sections),
        sections=sections,
        histories=tuple(charts.history_figure(s) for s in results.groups if len(s.points) > 1),
        curves=charts.curve_figures(results.groups),
        run_pages=_run_pages(results),
        device_use=use,
        device_figures=(
            *device_figures(results.measured, use),
            *heat_figures(results.measured, results.series, results.telemetry),
        ),
    )


def compare_two(location: str, a: str, b: str) -> Figure:
    """Put two runs of a store side by side."""
    with ResultsStore.open(location, create=False) as store:
        return charts.beside_figure(store.get_run(a), store.get_run(b))


def _run_pages(results: Results) -> tuple[RunPage, ...]:
    """Return the pages of the runs that are listed in full, newest first."""
    full = {run.id: run for run in results.full}
    before = find_runs_before(results.groups, full.keys())
    return tuple(
        run_page(
            full.get(run.id, run),
            results.telemetry.get(run.id, ()),
            full.get(before.get(run.id, "")),
            results.kept.get(run.id, KeptFiles()),
        )
        for run in reversed(results.listing.full)
    )


def run_page(
    run: Run,
    telemetry: Sequence[RepetitionTelemetry],
    before: Run | None = None,
    kept: KeptFiles | None = None,
) -> RunPage:
    """Compose the page of one run."""
    kept = kept or KeptFiles()
    timeline = build_timeline(run, telemetry, kept.traces)
    return RunPage(
        run,
        charts.repetitions_figure(run),
        timeline_figure(timeline),
        trace_address(timeline) if telemetry or timeline.traced else None,
        before,
        kept,
    )


def brief_results(one: RunMeans) -> str:
    """Format the main means of a run in one line: speeds and quality; empty if it has none."""
    return ", ".join(
        f"{find_metric(key).label} {find_metric(key).show(one.means[key])}"
        for key in BRIEF_METRICS
        if key in one.means
    )


def _section(
    results: Results,
    present: Mapping[str, tuple[str, ...]],
    changes: Sequence[ShownChange],
    key: Kind,
) -> Section:
    here = [run for run in results.done if _kind(run) == key]
    newest = max((run.created_at for run in here), default=None)
    now = [run for run in here if run.id in present or _is_side(run, newest)]
    return Section(
        key,
        summary.summarise(now, present),
        summary.perplexities(now, present),
        summary.task_rows(now, present),
        find_comparisons(here, results.comparisons),
        tuple(one for one in changes if _kind(one.series.newest) == key),
    )


def _kind(run: Run) -> Kind:
    return "emulator" if run.device.emulator else "imported" if run.origin else "hardware"


def _is_side(run: Run, newest: datetime | None) -> bool:
    """Return whether a run is a side of a recent comparison: no series has those."""
    return run.label in SIDES and newest is not None and run.created_at > newest - RECENT


def _title(runs: Sequence[Run]) -> str:
    if not runs:
        return "No runs yet"
    devices = {(run.device.soc, run.device.serial, run.device.model): run for run in runs}
    models = _names({run.container.model for run in runs}, "model")
    return f"{models} on {_names({place(run) for run in devices.values()}, 'SoC')}"


def _names(names: AbstractSet[str], noun: str) -> str:
    unique = tuple(sorted(names))
    return text.listing(unique) if len(unique) <= MOST_NAMES else pluralize(len(unique), noun)


def _lead(results: Results) -> str:
    runs = [one.run for one in results.measured]
    if not runs:
        return "The results database holds no runs. `qnnfarm bench` adds some."
    first, last = text.day(runs[0].created_at), text.day(runs[-1].created_at)
    when = f"on {first}" if first == last else f"from {first} to {last}"
    lead = f"{pluralize(len(runs), 'run')} {when} (UTC)"
    gaps = len(results.gaps)
    if gaps == len(runs):
        lead += ", without a result"
    elif gaps:
        lead += f", {gaps} of them without a result"
    return f"{lead}."
