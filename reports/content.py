"""Content of a report: the results of a store, and the sections that they fall into."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.results.alerts import Alert
from harness.results.comparison import ComparisonGroup
from harness.results.device_health import DeviceHealth
from harness.results.gate import Gate
from harness.results.history import Series
from harness.results.metrics import (
    SPEED_METRICS,
    STEP_METRICS,
    TASK_METRICS,
    Metric,
    find_metric,
)
from harness.results.perplexity import PERPLEXITY, REFERENCES
from harness.results.records import (
    ArtifactRecord,
    ComparisonRecord,
    RepetitionTelemetry,
    Run,
    RunMeans,
)
from harness.results.timeline import UNTRACED, Traces
from harness.words import HOST_CPU, stand_in
from reports import text
from reports.changes import ShownChange
from reports.history import SeriesGroup
from reports.summary import UNCHECKED, Matrix, SummaryRow, find_matrices

Kind = Literal["hardware", "imported", "emulator"]
TITLES: Mapping[Kind, str] = {
    "hardware": "on hardware",
    "imported": "from other tools",
    "emulator": "on the emulator",
}
_MOST_OPEN = 12
"""Rows that are read whole though there are matrices."""
MANY_ROWS = 3
"""Remarks that so many rows of a section share, and a tenth of them, are said once."""
MOST_IN_FULL = 200
"""Runs with a page of their own in a report of one file: the newest of each kind, and then the
newest; others get a line each."""
MOST_IN_BRIEF = 2000


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The files that are kept with a run.

    Attributes:
        logs: their names and ends.
    """

    artifacts: tuple[ArtifactRecord, ...] = ()
    logs: tuple[tuple[str, str], ...] = ()
    traces: Traces = UNTRACED


@dataclass(frozen=True, slots=True)
class Listing:
    """All runs, oldest first, in full or briefly.

    Attributes:
        full: the newest of each model, precision, SoC and kind of run, and the newest of all.
        brief: the others.
        left_out: number of still older runs.
    """

    full: tuple[Run, ...]
    brief: tuple[Run, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a store.

    Attributes:
        name: the database's name.
        measured: all runs with their means and without measurements, oldest first.
        groups: the histories of the time that is shown.
        series: the same, whole, as they are judged.
        listing: which of them have a page.
        full: the runs of the summary and of the run pages with their measurements, oldest first.
        alerts: of the histories' losses, as `qnnfarm alerts ls` would show them.
        gate: the newest results against a baseline, if one was asked for.
        telemetry: by run, of the newest runs that have any.
        comparisons: their terms and verdicts, by group.
        location: the `--db` that opens it, without a password.
        devices: health of the pool's devices, if a pool is known.
        kept: the files that are kept with runs, by run.
        options: of `qnnfarm report`, beside its `--db`, by which they were asked for.
        is_public: whether they are a copy for everybody to see.
    """

    name: str
    measured: tuple[RunMeans, ...]
    groups: tuple[SeriesGroup, ...]
    series: tuple[Series, ...]
    listing: Listing
    full: tuple[Run, ...]
    alerts: tuple[Alert, ...] = ()
    gate: Gate | None = None
    telemetry: Mapping[str, tuple[RepetitionTelemetry, ...]] = field(default_factory=dict)
    comparisons: Mapping[str, ComparisonRecord] = field(default_factory=dict)
    location: str = "results.db"
    devices: tuple[DeviceHealth, ...] = ()
    kept: Mapping[str, KeptFiles] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    is_public: bool = False

    @property
    def done(self) -> tuple[Run, ...]:
        """The runs with a result that are here in full."""
        return tuple(run for run in self.full if run.status == "done")

    @property
    def gaps(self) -> tuple[Run, ...]:
        """Runs without a result: failed, interrupted, or still running."""
        return tuple(one.run for one in self.measured if one.run.status != "done")


@dataclass(frozen=True, slots=True)
class Section:
    """The results of one kind, none of which is ranked with another.

    Attributes:
        key: its kind, also its name for anchors.
    """

    key: Kind
    rows: tuple[SummaryRow, ...]
    perplexities: tuple[SummaryRow, ...]
    tasks: tuple[SummaryRow, ...]
    comparisons: tuple[ComparisonGroup, ...]
    changes: tuple[ShownChange, ...] = ()

    @property
    def columns(self) -> tuple[Metric, ...]:
        """The columns of the summary: the speeds and perplexities of any row."""
        return _columns(self.rows, (*SPEED_METRICS, PERPLEXITY, *REFERENCES))

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The rows again, a metric at a time."""
        return find_matrices(self.rows)

    def doubt(self, row: SummaryRow, said: Container[str]) -> str:
        """Return the warning about a row's output, unless it is said of many rows at once."""
        return "" if row.output == "unchecked" and UNCHECKED in said else row.doubt

    @property
    def folded(self) -> bool:
        """True where its matrices are read in place of so many rows."""
        return len(self.rows) > _MOST_OPEN and bool(self.matrices)

    @property
    def perplexity_columns(self) -> tuple[Metric, ...]:
        """The perplexities and metrics of decode steps of any of them."""
        return _columns(self.perplexities, (PERPLEXITY, *REFERENCES, *STEP_METRICS))

    @property
    def task_columns(self) -> tuple[Metric, ...]:
        """The metrics of any task."""
        return _columns(self.tasks, TASK_METRICS)

    @property
    def emulator(self) -> bool:
        """True for results of the emulator."""
        return self.key == "emulator"

    @property
    def title(self) -> str:
        """The origin of its results, in words: `on hardware`."""
        if self.emulator and self._on_host_cpu:
            return f"on the {' and the '.join(self._on_host_cpu)}"
        tools = tuple(sorted({row.subject.tool for row in self.rows}))
        return (
            f"from {text.listing(tools) or 'files'}" if self.key == "imported" else TITLES[self.key]
        )

    @property
    def notice(self) -> str:
        """Warning about the speed of virtual devices."""
        whose = "Its" if self._on_host_cpu == (HOST_CPU,) else "Emulator"
        return f"{whose} speed is not hardware speed."

    @property
    def processors(self) -> str:
        """Processors of virtual devices, in words: `with the HTP emulator`."""
        own = {"emulator": "with the HTP emulator", HOST_CPU: "on their CPU by programs of others"}
        return " or ".join(own[one] for one in self._on_host_cpu or ("emulator",))

    @property
    def _on_host_cpu(self) -> tuple[str, ...]:
        """All kinds of processors of virtual devices, if not the emulator alone."""
        subjects = [row.subject for row in self.rows]
        subjects += [row.subject for row in (*self.perplexities, *self.tasks)]
        kinds = {stand_in(subject.runtime) for subject in subjects}
        return tuple(sorted(kinds)) if HOST_CPU in kinds else ()

    @property
    def shared_remarks(self) -> Mapping[str, int]:
        """Number of rows by remark or reason of a grade, of those that many rows share."""
        counts = Counter(words for row in self.rows for words in {*row.remarks, *row.grade_reasons})
        many = max(MANY_ROWS, len(self.rows) / 10)
        return {words: count for words, count in counts.items() if count >= many}


def _columns(rows: Sequence[SummaryRow], keys: Sequence[str]) -> tuple[Metric, ...]:
    return tuple(find_metric(key) for key in keys if any(key in row.cells for row in rows))


def list_runs(runs: Sequence[Run], most: int = MOST_IN_FULL) -> Listing:
    """Choose which runs to list in full.

    Args:
        runs: oldest first.
    """
    if len(runs) <= most:
        return Listing(tuple(runs), ())
    newest = {
        (
            run.kind,
            run.container.model,
            run.container.precision,
            run.device.soc,
            run.device.emulator,
        ): run.id
        for run in runs
    }
    of_its_kind = frozenset(newest.values())
    others = [run.id for run in runs if run.id not in of_its_kind]
    first = [run.id for run in runs if run.id in of_its_kind]
    in_full = {*(others + first)[-most:]}
    brief = [run for run in runs if run.id not in in_full]
    return Listing(
        tuple(run for run in runs if run.id in in_full),
        tuple(brief[-MOST_IN_BRIEF:]),
        max(0, len(brief) - MOST_IN_BRIEF),
    )
