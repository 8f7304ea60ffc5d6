"""History: one series for each thing that is measured again and again.

A series is a model in one precision with one set of graphs, on one kind of device and SoC, under
one workload. The container's hash and the versions of libraries are no part of it, as a new build
is what a history is there to judge. A point of a series is a group of sessions: what one cell of a
plan, or one `qnnfarm bench`, measured.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from harness.results.comparison import SIDES
from harness.results.identity import SpeedKey
from harness.results.means import RunMeans
from harness.results.metrics import Direction, find_metric
from harness.results.records import Run

if TYPE_CHECKING:
    from harness.results.changes import Change

HISTORY_METRICS = (
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "ttft_s",
    "peak_rss_bytes",
    "perplexity",
)
CURRENT = timedelta(hours=24)
"""What a series measured in this time before its newest run is its present state."""
MOST_POINTS = 400
"""Points of a series in a report; of more, the newest are kept whole and the others thinned."""


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """Identity of a series.

    Attributes:
        speed: subject and workload without the container's hash and without versions.
        dataset: of a perplexity.
    """

    speed: SpeedKey
    precision: str | None
    ars: tuple[int, ...]
    cl: int
    label: str
    dataset: str = ""

    @classmethod
    def of(cls, run: Run) -> "SeriesKey":
        """Return the series of a run."""
        key = SpeedKey.of(run)
        subject = replace(key.subject, container_sha256="", versions=(), qnnfarm_version="")
        definition = run.workload.perplexity
        scored = f"{definition.positions} {definition.windows}" if definition else ""
        return cls(
            replace(key, subject=subject),
            run.container.precision,
            run.container.ars,
            run.container.cl,
            run.label,
            f"{run.workload.dataset_sha256 or ''} {scored}".strip(),
        )

    @property
    def graphs(self) -> str:
        """Graphs: `AR 1, 128, CL 4096`."""
        return f"AR {', '.join(map(str, self.ars))}, CL {self.cl}"

    @property
    def title(self) -> str:
        """Name for people: `Llama-3.2-1B W4A16 on SM8750, pp512+tg128`."""
        subject, workload = self.speed.subject, self.speed.label
        name = f"{subject.model} {self.precision or ''}".strip()
        parts = (f"{name} on {subject.place}", workload, self.label)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Point:
    """The sessions of one group.

    Attributes:
        at: when the first of them began.
        values: the mean of the sessions' means, by metric.
        pushed_bytes: what a deployment put on the device, or found there.
        sessions: the device and the means of each session.
        runs: the sessions, oldest first.
    """

    at: datetime
    values: Mapping[str, float]
    runs: tuple[Run, ...]
    pushed_bytes: float | None = None
    sessions: tuple[tuple[str, Mapping[str, float]], ...] = ()

    @property
    def commit(self) -> str:
        """The commit that was measured; empty if unknown."""
        return self.runs[-1].provenance.git_commit or ""

    @property
    def size_bytes(self) -> float | None:
        """Size of the container, or of what was deployed, as far as known."""
        return self.runs[-1].container.size_bytes or self.pushed_bytes

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the container's files for each weight of the model, if both are known."""
        container = self.runs[-1].container
        if not container.size_bytes or not container.parameters:
            return None
        return 8 * container.size_bytes / container.parameters

    @property
    def sha256(self) -> str:
        """The container that was measured."""
        return self.runs[-1].container.sha256


@dataclass(frozen=True, slots=True)
class Series:
    """All points of one thing, oldest first.

    Attributes:
        changes: the changes of level of each metric; their nights are numbers of points.
    """

    key: SeriesKey
    points: tuple[Point, ...]
    changes: "Mapping[str, tuple[Change, ...]]" = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A name for anchors that stays the same from report to report."""
        import hashlib

        return hashlib.sha256(repr(self.key).encode()).hexdigest()[:12]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that any point has."""
        return tuple(
            key for key in HISTORY_METRICS if any(key in point.values for point in self.points)
        )

    @property
    def present(self) -> tuple[Point, ...]:
        """The points of the present state."""
        return tuple(p for p in self.points if p.at > self.points[-1].at - CURRENT)

    @property
    def past(self) -> tuple[Point, ...]:
        """The points before the present state."""
        return self.points[: len(self.points) - len(self.present)]


def find_series(measured: Iterable[RunMeans]) -> tuple[Series, ...]:
    """Sort runs that are done into series, by model, SoC and workload.

    Args:
        measured: oldest first.
    """
    groups: dict[SeriesKey, dict[tuple[str, str], list[RunMeans]]] = {}
    for one in measured:
        if _is_of_a_series(one):
            found = groups.setdefault(SeriesKey.of(one.run), {})
            found.setdefault((one.run.group_id, one.run.container.sha256), []).append(one)
    series = [
        Series(key, tuple(sorted(map(_point, found.values()), key=lambda point: point.at)))
        for key, found in groups.items()
    ]
    return tuple(sorted(series, key=lambda one: _order(one.key)))


def _is_of_a_series(one: RunMeans) -> bool:
    """Whether a run has a place in a history: a side of a comparison stands for itself."""
    measured = any(key in one.means for key in HISTORY_METRICS)
    return one.run.status == "done" and one.run.label not in SIDES and measured


def find_levels(series: Sequence[Series]) -> tuple[Series, ...]:
    """Find the changes of level of each metric of each series; see `harness.results.changes`."""
    from harness.results.changes import History, detect_all

    wanted: list[tuple[int, str]] = []
    histories: list[History] = []
    for number, one in enumerate(series):
        for key in one.metrics:
            told = [
                (values[key], night, device)
                for night, point in enumerate(one.points)
                for device, values in point.sessions
                if values.get(key, 0.0) > 0
            ]
            if told:
                higher = find_metric(key).direction is Direction.HIGHER
                wanted.append((number, key))
                histories.append(
                    History(
                        [value for value, _, _ in told],
                        [night for _, night, _ in told],
                        [device for _, _, device in told],
                        higher_is_better=higher,
                    )
                )
    found: dict[int, dict[str, tuple[Change, ...]]] = {}
    for (number, key), changes in zip(wanted, detect_all(histories), strict=True):
        if changes:
            found.setdefault(number, {})[key] = changes
    return tuple(replace(one, changes=found.get(number, {})) for number, one in enumerate(series))


def find_present(series: Sequence[Series]) -> frozenset[str]:
    """Return the ids of the runs of the containers that are the present state of their series."""
    found: set[str] = set()
    for one in series:
        containers = {point.sha256 for point in one.present}
        points = (point for point in one.points if point.sha256 in containers)
        found |= {run.id for point in points for run in point.runs}
    return frozenset(found)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Keep the newest half of the points that may be shown whole, and every n-th of the others."""
    if len(points) <= most:
        return tuple(points)
    newest, older = points[-(most // 2) :], points[: -(most // 2)]
    step = -(-len(older) // (most // 2))
    return (*older[::step], *newest)


def _point(group: Sequence[RunMeans]) -> Point:
    values = {}
    for key in HISTORY_METRICS:
        means = [one.means[key].value for one in group if key in one.means]
        if means:
            values[key] = statistics.fmean(means)
    return Point(
        group[0].run.created_at,
        values,
        tuple(one.run for one in group),
        _size(group[-1]),
        tuple(
            (one.run.device.serial, {key: mean.value for key, mean in one.means.items()})
            for one in group
        ),
    )


def _size(one: RunMeans) -> float | None:
    pushed, reused = one.means.get("push_bytes"), one.means.get("reused_bytes")
    return pushed.value + reused.value if pushed and reused else None


def _order(key: SeriesKey) -> tuple[object, ...]:
    subject = key.speed.subject
    return (
        subject.emulator,
        subject.model,
        subject.soc,
        key.precision or "",
        key.cl,
        key.speed.label,
        key.label,
        key.dataset,
        repr(key.speed),
    )
