"""Content of a report, before it becomes HTML, JSON or terminal output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.results import stats
from harness.results.comparison import ComparisonGroup, find_comparisons
from harness.results.identity import place
from harness.results.metrics import Metric, find_metric
from harness.results.records import ComparisonRecord, RepetitionTelemetry, Run
from harness.results.store import EVERYTHING, ResultsStore, RunFilter
from harness.words import pluralize
from reports import plots, summary, telemetry, text
from reports.plots import Plot
from reports.summary import SPEED_METRICS, FailureGroup, PerplexityRow, Row
from reports.telemetry import TelemetryFigure

MOST_NAMES = 3
MOST_IN_FULL = 500
"""Runs that a report lists in full, so that it stays small; older ones get a line each."""
MOST_PLOTTED = 12
"""Runs whose telemetry is read, the newest ones: it is by far the largest part of a store."""
_BRIEF_METRICS = ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s")


@dataclass(frozen=True, slots=True)
class Results:
    """The runs of a store.

    Attributes:
        name: the database's name.
        done: runs with a result, oldest first.
        gaps: runs without a result: failed, interrupted, or still running.
        telemetry: by run, of the newest runs that have any.
        comparisons: their terms and verdicts, by group.
    """

    name: str
    done: tuple[Run, ...]
    gaps: tuple[Run, ...]
    telemetry: Mapping[str, tuple[RepetitionTelemetry, ...]] = field(default_factory=dict)
    comparisons: Mapping[str, ComparisonRecord] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, oldest first."""
        return tuple(sorted((*self.done, *self.gaps), key=lambda run: (run.created_at, run.id)))


@dataclass(frozen=True, slots=True)
class Listing:
    """All runs, oldest first, in full or briefly.

    Attributes:
        full: the newest ones, and the newest of each container, SoC and kind of run.
        brief: the others.
    """

    full: tuple[Run, ...]
    brief: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """The results of one kind of device: hardware, or the emulator."""

    emulator: bool
    rows: tuple[Row, ...]
    perplexities: tuple[PerplexityRow, ...]
    plots: tuple[Plot, ...]
    comparisons: tuple[ComparisonGroup, ...]
    figures: tuple[TelemetryFigure, ...]

    @property
    def speed_metrics(self) -> tuple[Metric, ...]:
        """The speed metrics of any row: the columns of the summary."""
        return tuple(
            find_metric(key) for key in SPEED_METRICS if any(key in row.cells for row in self.rows)
        )

    @property
    def key(self) -> str:
        """A name for anchors."""
        return "emulator" if self.emulator else "hardware"


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A text, and the runs that generated exactly it from the same prompt."""

    prompt: str | None
    text: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    results: Results
    title: str
    lead: str
    sections: tuple[Section, ...]
    texts: tuple[GeneratedText, ...]

    @property
    def failures(self) -> tuple[FailureGroup, ...]:
        """The runs without a result, those that ended alike together."""
        return summary.group_failures(self.results.gaps)

    @property
    def listing(self) -> Listing:
        """Rows of the list of runs."""
        return list_runs(self.results.runs)

    @property
    def has_emulator(self) -> bool:
        """Whether any run was on the emulator."""
        return any(run.device.emulator for run in self.results.runs)

    @property
    def has_hardware(self) -> bool:
        """Whether any run was on hardware."""
        return any(not run.device.emulator for run in self.results.runs)


def load(location: str, wanted: RunFilter = EVERYTHING) -> Results:
    """Read the runs of a store.

    Raises:
        StoreError: there is no such store, or it cannot be read.
    """
    with ResultsStore.open(location, create=False) as store:
        runs = store.list_runs(wanted)
        name = store.location.rstrip("/").rpartition("/")[2]
        telemetry = _telemetry(store, runs)
        comparisons = store.comparisons()
    return Results(
        name=name,
        done=tuple(run for run in runs if run.status == "done"),
        gaps=tuple(run for run in runs if run.status != "done"),
        telemetry=telemetry,
        comparisons=comparisons,
    )


def _telemetry(
    store: ResultsStore, runs: tuple[Run, ...]
) -> dict[str, tuple[RepetitionTelemetry, ...]]:
    newest = store.newest_with_telemetry(MOST_PLOTTED)
    return {run.id: store.telemetry(run.id) for run in runs if run.id in newest}


def compose(results: Results) -> Page:
    """Compose the page of the results."""
    sections = (_section(results, emulator=emulator) for emulator in (False, True))
    return Page(
        results=results,
        title=_title(results.runs),
        lead=_lead(results),
        sections=tuple(
            section
            for section in sections
            if section.rows or section.perplexities or section.figures
        ),
        texts=_texts(results.done),
    )


def list_runs(runs: Sequence[Run], most: int = MOST_IN_FULL) -> Listing:
    """Choose which runs to list in full.

    Args:
        runs: oldest first.
    """
    if len(runs) <= most:
        return Listing(tuple(runs), ())
    newest = {
        (run.kind, run.container.sha256, run.device.soc, run.device.emulator): run.id
        for run in runs
    }
    kept = {*newest.values(), *(run.id for run in runs[len(runs) - most :])}
    return Listing(
        tuple(run for run in runs if run.id in kept),
        tuple(run for run in runs if run.id not in kept),
    )


def brief_speeds(run: Run) -> str:
    """Format the means of a run's speeds in one line; empty if it has none."""
    words = []
    for key in _BRIEF_METRICS:
        found = stats.summarise([run.values(key)])
        if found is not None:
            metric = find_metric(key)
            words.append(f"{metric.label} {metric.show(found.mean)}")
    return ", ".join(words)


def _section(results: Results, *, emulator: bool) -> Section:
    runs = [run for run in results.done if run.device.emulator == emulator]
    figures = (
        telemetry.figure(run, results.telemetry[run.id])
        for run in results.runs
        if run.id in results.telemetry and run.device.emulator == emulator
    )
    return Section(
        emulator,
        summary.summarise(runs),
        summary.perplexities(runs),
        plots.plots(summary.speed_runs(runs)),
        find_comparisons(runs, results.comparisons),
        tuple(figure for figure in figures if figure is not None),
    )


def _title(runs: Sequence[Run]) -> str:
    if not runs:
        return "No runs yet"
    models = _names([run.container.model for run in runs], "model")
    return f"{models} on {_names([place(run) for run in runs], 'SoC')}"


def _names(names: Sequence[str], noun: str) -> str:
    unique = tuple(sorted(set(names)))
    return text.listing(unique) if len(unique) <= MOST_NAMES else pluralize(len(unique), noun)


def _lead(results: Results) -> str:
    runs = results.runs
    if not runs:
        return "The results database holds no runs. `qnnfarm bench` adds some."
    first, last = text.day(runs[0].created_at), text.day(runs[-1].created_at)
    when = f"on {first}" if first == last else f"from {first} to {last}"
    lead = f"{pluralize(len(runs), 'run')} {when} (UTC)"
    if not results.done:
        lead += ", without a result"
    elif results.gaps:
        lead += f", {len(results.gaps)} of them without a result"
    return f"{lead}."


def _texts(done: Sequence[Run]) -> tuple[GeneratedText, ...]:
    groups: dict[tuple[str | None, str], list[Run]] = {}
    for run in done:
        if run.generated_text is not None:
            groups.setdefault((run.workload.prompt, run.generated_text), []).append(run)
    return tuple(
        GeneratedText(prompt, generated, tuple(runs))
        for (prompt, generated), runs in groups.items()
    )
