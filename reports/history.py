"""Histories of a report: the series of one container, device and workload, a metric each."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from operator import attrgetter

from harness.results.history import MeasuredNight, Series
from harness.results.metrics import LEADING_METRICS, find_metric
from harness.results.nights import PAUSE, group_nights
from harness.results.records import SIDES, Run, RunHead, RunMeans
from harness.words import percent, pluralize
from reports.text import day


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A night, with the means of all its metrics.

    Attributes:
        runs: oldest first.
        newest: the last of them.
    """

    at: datetime
    values: Mapping[str, float]
    runs: tuple[RunHead, ...]
    newest: RunMeans

    @property
    def sha256(self) -> str:
        """The container that was measured."""
        return self.runs[-1].sha256

    @property
    def size_bytes(self) -> float | None:
        """Size of the container, or of its deployment, as far as known."""
        means, size = self.newest.means, self.newest.run.container.size_bytes
        push, reuse = means.get("push_bytes"), means.get("reused_bytes")
        return size or (push + reuse if push and reuse else None)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the container's files for each weight of the model, if both are known."""
        container = self.newest.run.container
        if not container.size_bytes or not container.parameters:
            return None
        return 8 * container.size_bytes / container.parameters


@dataclass(frozen=True, slots=True)
class SeriesGroup:
    """A container, device and workload: the series of all its metrics.

    Attributes:
        points: its nights, oldest first.
    """

    series: tuple[Series, ...]
    points: tuple[HistoryPoint, ...]

    @property
    def id(self) -> str:
        """A name for anchors that stays the same from report to report."""
        return self.series[0].subject

    @property
    def newest(self) -> Run:
        """The last run, which names the container, device and workload of all."""
        return self.points[-1].newest.run

    @property
    def title(self) -> str:
        """Name for people: `Llama-3.2-1B W4A16 on SM8750, pp512+tg128`."""
        return self.series[0].title

    @property
    def runs(self) -> tuple[RunHead, ...]:
        """All runs, oldest first."""
        return tuple(run for point in self.points for run in point.runs)

    @property
    def present(self) -> tuple[HistoryPoint, ...]:
        """The nights of the containers of the last night, from the newest change of a rate on."""
        newest = self.points[-1].at
        containers = {point.sha256 for point in self.points if point.at > newest - PAUSE}
        since = max((_began(one) for one in self._changed), default=self.points[0].at)
        return tuple(p for p in self.points if p.sha256 in containers and p.at >= since)

    @property
    def remarks(self) -> tuple[str, ...]:
        """List the nights that a mean over the present ones leaves out, with the reasons."""
        containers = {point.sha256 for point in self.present}
        return tuple(
            _remark(one, before)
            for one in self._changed
            for before in [sum(p.sha256 in containers for p in self.points if p.at < _began(one))]
            if before
        )

    @property
    def _changed(self) -> tuple[Series, ...]:
        leading = (one for one in self.series if one.metric.key in LEADING_METRICS)
        return tuple(one for one in leading if one.changes)


def group_series(series: Sequence[Series], measured: Iterable[RunMeans]) -> tuple[SeriesGroup, ...]:
    """Put the series of all metrics of one container, device and workload together."""
    means_of = {one.run.id: one for one in measured}
    by_subject: dict[str, list[Series]] = {}
    for one in series:
        by_subject.setdefault(one.subject, []).append(one)
    groups = (SeriesGroup(tuple(alike), _points(alike, means_of)) for alike in by_subject.values())
    return tuple(sorted(groups, key=_order))


def find_present(
    groups: Sequence[SeriesGroup], runs: Sequence[Run] = ()
) -> Mapping[str, tuple[str, ...]]:
    """Return the ids of the runs of the present state, with remarks on them.

    Args:
        runs: all of them, oldest first: those of the last night on another branch are present, too.
    """
    branches = {run.branch for group in groups for run in group.runs} | {None}
    others = [RunHead.of(run) for run in runs if run.label not in SIDES]
    remarks_of: dict[str, tuple[str, ...]] = {
        head.id: (f"On the branch {head.branch}, which is not that of the history",)
        for night in group_nights(others)
        if night[-1].created_at > runs[-1].created_at - PAUSE
        for head in night
        if head.branch not in branches
    }
    for group in groups:
        remarks = group.remarks
        remarks_of |= {run.id: remarks for point in group.present for run in point.runs}
    return remarks_of


def find_runs_before(groups: Sequence[SeriesGroup], among: Container[str]) -> dict[str, str]:
    """Return the id of the run before each run of the same subject, of those that are chosen."""
    ids_by_group = ([run.id for run in group.runs if run.id in among] for group in groups)
    return {run: before for runs in ids_by_group for before, run in pairwise(runs)}


def commit_range(series: Series, night: MeasuredNight) -> str:
    """Name the commits from the night before to a night: `4f2a9d1c88..9b2d4e7710`, if known."""
    number = next(n for n, one in enumerate(series.nights) if one.at == night.at)
    both = [one.commit for one in series.nights[max(number - 1, 0) : number + 1]]
    return "..".join(dict.fromkeys(commit[:10] for commit in both if commit))


def _points(alike: Sequence[Series], means_of: Mapping[str, RunMeans]) -> tuple[HistoryPoint, ...]:
    values: dict[datetime, dict[str, float]] = {}
    heads: dict[datetime, dict[str, RunHead]] = {}
    for series in alike:
        for night in series.nights:
            values.setdefault(night.at, {})[series.metric.key] = night.mean
            heads.setdefault(night.at, {}).update((one.head.id, one.head) for one in night.sessions)
    points = []
    for at in sorted(values):
        runs = sorted(heads[at].values(), key=attrgetter("created_at"))
        points.append(HistoryPoint(at, values[at], tuple(runs), means_of[runs[-1].id]))
    return tuple(points)


def _began(series: Series) -> datetime:
    """Return the time at which the newest level of a series began."""
    return series.nights[series.changes[-1].night].at


def _remark(series: Series, before: int) -> str:
    change = series.changes[-1]
    after = len(series.nights) - change.night
    words = f"{percent(change.ratio - 1)} since {day(_began(series))} ({pluralize(after, 'night')})"
    words = f"{change.scope} {words}" if change.scope else words
    metric = find_metric(series.metric.key).label
    return f"{metric}: {words}; the row leaves out the {pluralize(before, 'night')} before"


def _order(group: SeriesGroup) -> tuple[object, ...]:
    run = group.newest
    container = run.container
    return (
        run.device.emulator,
        container.model,
        run.device.soc,
        container.precision or "",
        container.cl,
        group.title,
        group.id,
    )
