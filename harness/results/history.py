"""Histories: the same measurement night after night, with its changes.

A series has one metric of one `Subject` on one branch: the repository's default branch, or else the
most frequent one. Runs outside of any repository belong to it, too. Its nights (see
`harness.results.nights`) hold the sessions of one commit and container. Runs with a failed output
check, both sides of comparisons and warm-ups are left out; commits off the branch stand apart.

`read_series`, `iterate_series` and `find_series` are the only makers of histories: `qnnfarm
history`, alerts, nightly jobs and reports all show these.
"""

import hashlib
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import Select, select

from harness.results import schema
from harness.results.identity import (
    OF_DEVICE,
    Subject,
    container_label,
    container_name,
    container_shape,
    describe_changes,
    describe_container,
    facts,
    place,
)
from harness.results.metrics import JUDGED_METRICS, Direction, Metric, Use, find_metric
from harness.results.nights import choose_branch, find_main_branch, find_strays, group_nights
from harness.results.provenance import git_branches, own_version
from harness.results.records import SIDES, Run, RunHead, RunMeans
from harness.results.stability import start_temperature
from harness.results.statistics import changes
from harness.results.statistics.changes import (
    SMALLEST,
    VISIBLE_IN,
    Change,
    History,
    SeriesJudgement,
    judge_all,
)
from harness.results.statistics.medians import MIN_BEFORE, go_together, half_width
from harness.results.statistics.planning import plan_sessions
from harness.results.store import ResultsStore, without_collection
from harness.results.verdicts import PERPLEXITY_THRESHOLD
from harness.words import percent, soc_label

LEVEL_NIGHTS = 14
"""Nights next to a change that give the levels before and since."""
AGES = (30, 90, 365)
"""Days ago that the present is held against."""
_BEYOND = 1.5
"""Half widths of an interval beyond which a slow change is no noise."""
_SUBJECTS_AT_ONCE = 100
"""PostgreSQL reads all measurements for each part of the subjects."""
_NONE: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class MeasuredSession:
    """A run in a history.

    Attributes:
        value: mean of the measured repetitions, in the metric's unit.
    """

    head: RunHead
    value: float


@dataclass(frozen=True, slots=True)
class MeasuredNight:
    """Sessions of one commit and container on one night.

    Attributes:
        at: the beginning of the subject's first run of that night, with or without the metric.
    """

    at: datetime
    sessions: tuple[MeasuredSession, ...]

    @property
    def commit(self) -> str | None:
        """The commit of all of them."""
        return self.sessions[0].head.commit

    @property
    def devices(self) -> tuple[str, ...]:
        """The serials of its devices, each once."""
        return tuple(dict.fromkeys(one.head.device for one in self.sessions))

    def of(self, devices: Collection[str]) -> "MeasuredNight":
        """Return the night with the sessions of some devices only, maybe none; empty means all."""
        if not devices or all(one.head.device in devices for one in self.sessions):
            return self
        chosen = (one for one in self.sessions if one.head.device in devices)
        return replace(self, sessions=tuple(chosen))

    @property
    def mean(self) -> float:
        """Mean of the sessions."""
        return math.fsum(session.value for session in self.sessions) / len(self.sessions)


Levels = tuple[Sequence[MeasuredNight], Sequence[MeasuredNight]]


@dataclass(frozen=True, slots=True)
class Drift:
    """The change of a level since some time ago, as a slow ramp makes it.

    Attributes:
        ratio: the newest nights over those about so many days ago, each device against itself.
        half: of the interval, of the logarithm.
        told: ratio of the changes of level that were told since.
    """

    metric: Metric
    days: int
    ratio: float
    half: float
    told: float

    def __str__(self) -> str:
        told = f", {percent(self.told - 1)} of it told" if self.told != 1 else ""
        width = math.expm1(self.half)
        return f"{percent(self.ratio - 1)} ± {width:.1%} against {self.days} days ago{told}"

    @property
    def is_change(self) -> bool:
        """True where it is beyond noise, and counts."""
        return self._counts(self.ratio)

    @property
    def is_untold(self) -> bool:
        """True for a loss of which a part beyond noise was never told."""
        rest = self.ratio / self.told
        is_loss = self.metric.gain(self.ratio) < 0 and self.metric.gain(rest) < 0
        return is_loss and self.is_change and self._counts(rest)

    def _counts(self, ratio: float) -> bool:
        is_beyond = abs(math.log(ratio)) > _BEYOND * self.half
        return is_beyond and abs(self.metric.gain(ratio)) > _smallest(self.metric)


@dataclass(frozen=True)
class Series:
    """One history with its changes.

    Attributes:
        subject: id of the `Subject`; the series of its metrics share it.
        runs: the last one and those beside changes, by id, without their measurements.
        changes: those that stand; their nights are places in `nights`.
        refuted: those that later nights have refuted.
        apart: nights of commits off the branch, which are not judged (`nights.find_strays`).
        smallest_loss: the smallest one that would be told in time, as `SeriesJudgement` has it.
        unit, wandering: as `SeriesJudgement` has them.
        whole: the history that this is a part of; None for a whole one.
    """

    subject: str
    metric: Metric
    nights: tuple[MeasuredNight, ...]
    runs: Mapping[str, Run] = field(default_factory=dict, repr=False, compare=False)
    changes: tuple[Change, ...] = ()
    refuted: tuple[Change, ...] = ()
    apart: tuple[MeasuredNight, ...] = ()
    smallest_loss: float | None = None
    unit: float = 0.0
    wandering: tuple[float, ...] = (1.0,)
    whole: "Series | None" = field(default=None, repr=False, compare=False)

    @property
    def id(self) -> str:
        """Stable: of the metric and of the facts that all runs share."""
        return f"{self.subject}-{self.metric.key}"

    @property
    def newest(self) -> Run:
        """The last run, which names the container, device and workload of all."""
        return self.runs[self.nights[-1].sessions[-1].head.id]

    @property
    def workload(self) -> str:
        """The workload in llama-bench's words, as `pp512+tg128`."""
        return Subject.of(self.newest).label

    @cached_property
    def name(self) -> str:
        """Container, workload and device in one line."""
        subject = Subject.of(self.newest)
        device, where = subject.device, self.place
        where = f"{where} ({device})" if device and device != where else where
        label = container_label(self.newest.label)
        container = describe_container(self.newest.container)
        text = f"{', '.join(filter(None, (container, subject.by, self.workload)))} on {where}"
        return f"{label}: {text}" if label else text

    @cached_property
    def title(self) -> str:
        """A shorter name: `Llama-3.2-1B W4A16 on SM8750, pp512+tg128`."""
        run = self.newest
        own = (f"{key}={value}" for key, value in run.labels.items())
        parts = (self.workload, Subject.of(run).by, container_label(run.label), *own)
        where = f"{container_name(run.container)} on {self.place}"
        return ", ".join((where, *filter(None, parts)))

    @property
    def place(self) -> str:
        """The SoC, or the kind of device where it is unknown: `SM8750`, `SM8750 emulator`."""
        return soc_label(
            place(self.newest), emulator=self.emulator, runtime=self.newest.workload.runtime
        )

    @property
    def shape(self) -> str:
        """Shapes of the graphs: `AR 1, 128, CL 4096`."""
        return container_shape(self.newest.container)

    @property
    def emulator(self) -> bool:
        """True where it was measured on the emulator."""
        return self.newest.device.emulator

    @property
    def run_ids(self) -> frozenset[str]:
        """The ids of all of its runs."""
        return frozenset(one.head.id for night in self.nights for one in night.sessions)

    def since(self, moment: datetime | None) -> "Series":
        """Return the part from a moment on, with its changes as the whole was judged."""
        at = [night.at for night in self.nights]
        first = 0 if moment is None else min(bisect_left(at, moment), len(at) - 1)
        return replace(
            self,
            whole=self.whole or self,
            nights=self.nights[first:],
            changes=_moved(self.changes, first),
            refuted=_moved(self.refuted, first),
            apart=tuple(one for one in self.apart if moment is None or one.at >= moment),
        )

    @cached_property
    def drifts(self) -> tuple[Drift, ...]:
        """The changes of the whole history against `AGES`."""
        return tuple(_drifts(self.whole or self))

    @property
    def sensitivity(self) -> str:
        """Say which losses cannot be seen soon; empty in a series too short to be judged."""
        if self.smallest_loss is None:
            return ""
        return f"a loss under {self.smallest_loss:.1%} would not be seen in {VISIBLE_IN} nights"

    def commits(self, change: Change) -> tuple[str | None, str | None]:
        """Return the last commit before a change, and the first one with it."""
        before, after = self._beside(change)
        return before.commit, after.commit

    def differences(self, change: Change) -> tuple[str, ...]:
        """List other changes between the two nights: containers, libraries, builds of phones."""
        return describe_changes(*map(self._runs_of, self._beside(change)))

    def differences_of_devices(self, change: Change) -> tuple[str, ...]:
        """List how the devices of a change, where it is not of all, became others: their builds."""
        if not change.devices:
            return ()
        before, after = map(self._runs_of, self._beside(change))
        return describe_changes(before, after, ignored=facts(before[-1]).keys() - OF_DEVICE)

    def first_night(self, change: Change) -> MeasuredNight:
        """Return the first night since a change on which its devices measured; only these."""
        return self._beside(change)[1]

    def runs_to_show(self) -> Iterator[str]:
        """Yield the ids of the runs that `runs` has to have."""
        yield self.nights[-1].sessions[-1].head.id
        for change in (*self.changes, *self.refuted):
            either_side = self.nights[change.night - 1 : change.night + 1]
            for night in (*self._beside(change), *either_side):
                yield from (one.head.id for one in night.sessions)

    def _runs_of(self, night: MeasuredNight) -> list[Run]:
        return [self.runs[one.head.id] for one in night.sessions]

    def _beside(self, change: Change) -> tuple[MeasuredNight, MeasuredNight]:
        """Return the nights before and since a change, with the sessions of its devices."""
        before = (one.of(change.devices) for one in reversed(self.nights[: change.night]))
        since = (one.of(change.devices) for one in self.nights[change.night :])
        empty = self.nights[change.night - 1], self.nights[change.night]
        return (
            next((night for night in before if night.sessions), empty[0]),
            next((night for night in since if night.sessions), empty[1]),
        )

    def levels_beside(self, change: Change, changes: Iterable[Change] = ()) -> "Levels":
        """Return the nights of the levels before and since a change that are next to it.

        They are of its devices. Changes of other devices alone do not end a level.

        Args:
            changes: that end levels; by default those of the series.
        """
        edges = [one.night for one in changes or self.changes if one.concerns(change.devices)]
        first = max((edge for edge in edges if edge < change.night), default=0)
        end = min((edge for edge in edges if edge > change.night), default=len(self.nights))
        before, since = (
            [night for night in (one.of(change.devices) for one in nights) if night.sessions]
            for nights in (self.nights[first : change.night], self.nights[change.night : end])
        )
        return before[-LEVEL_NIGHTS:], since[:LEVEL_NIGHTS]

    @cached_property
    def swaps(self) -> Mapping[int, str]:
        """Nights from which other devices measure than on all nights before, with both in words.

        The levels before and since say nothing of each other.
        """
        devices = [night.devices for night in self.nights]
        last = {serial: number for number, some in enumerate(devices) for serial in some}
        swaps: dict[int, str] = {}
        old: tuple[str, ...] = ()
        reach = -1
        for number, some in enumerate(devices if len(last) > 1 else ()):
            if number and reach < number:
                swaps[number] = f"{', '.join(old)} → {', '.join(some)}"
                old = ()
            old = tuple(dict.fromkeys((*old, *some)))
            reach = max(reach, *(last[serial] for serial in some))
        return swaps

    def levels(self) -> tuple[tuple[int, int, float], ...]:
        """Return first night, last night and median of each stretch between changes."""
        starts = {0, *(change.night for change in self.changes), *self.swaps}
        edges = [*sorted(starts), len(self.nights)]
        return tuple(
            (first, end - 1, statistics.median([night.mean for night in self.nights[first:end]]))
            for first, end in pairwise(edges)
            if end > first
        )


@dataclass(frozen=True, slots=True)
class SeriesFilter:
    """Filter of histories; `None` matches all. A history is judged whole, even if a part is shown.

    Attributes:
        metrics: keys of the registry.
        model: of the container.
        device: a part of the SoC's, maker's or model's name or of the serial, in any case.
        since: the nights from then on are shown.
    """

    metrics: Sequence[str] = JUDGED_METRICS
    model: str | None = None
    device: str | None = None
    branch: str | None = None
    since: datetime | None = None


_EVERYTHING = SeriesFilter()


def read_series(store: ResultsStore, wanted: SeriesFilter = _EVERYTHING) -> tuple[Series, ...]:
    """Read all histories of a store, each judged night by night."""
    all_series = (one for some in iterate_series(store, wanted) for one in some)
    parts = (one.since(wanted.since) for one in all_series if _is_wanted(one, wanted))
    return _sort(parts, wanted.metrics)


def iterate_series(
    store: ResultsStore,
    wanted: SeriesFilter = _EVERYTHING,
    subjects: Collection[str] | None = None,
    placed: "PlacedRuns | None" = None,
) -> Iterator[tuple[Series, ...]]:
    """Read and judge whole histories, but hold only those of some subjects at a time.

    Args:
        wanted: its metrics, model and branch count.
        subjects: ids of the subjects that are read; by default all.
        placed: all runs of the store; by default they are read.
    """
    if subjects is not None and not subjects:
        return

    def read(ids: Collection[str]) -> Mapping[str, Run]:
        return {run.id: run for run in store.get_runs(sorted(ids), measured=False)}

    metrics = tuple(find_metric(key).key for key in wanted.metrics)
    query, column = _select(wanted), schema.runs.c.subject
    placed = placed or PlacedRuns.of(store.heads())
    if subjects is None:
        with store.database.reading() as connection:
            subjects = connection.scalars(query.with_only_columns(column).distinct()).all()
    ids = sorted(subjects)
    for first in range(0, len(ids), _SUBJECTS_AT_ONCE):
        part = ids[first : first + _SUBJECTS_AT_ONCE]
        some = query.where(column.in_(part))
        with without_collection():
            judged = _judge(part, store.means(some, metrics), placed, metrics, read)
        yield judged


def mark_store(store: ResultsStore) -> str:
    """Mark a store and who judges it: where that is the same, so are all of `mark_subjects`.

    It costs a tenth of that. The branches of the repository say which runs are strays.
    """
    parts = (_mark_judge(), git_branches(Path.cwd()), store.mark_heads())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def mark_subjects(placed: "PlacedRuns") -> dict[str, str]:
    """Mark each subject: a mark changes with the content of the subject's histories.

    That is its runs, their nights, the branch that counts, and the code that judges.
    """
    begin = f"{_mark_judge()} {placed.branch}\n"
    strays = find_strays(chain.from_iterable(placed.subjects.values()), placed.branch)
    marks = {}
    for subject, heads in placed.subjects.items():
        places = (f"{head.id} {placed.nights[head.id]} {head.id in strays}\n" for head in heads)
        marks[subject] = hashlib.sha256("".join((begin, *places)).encode()).hexdigest()
    return marks


def _mark_judge() -> str:
    """Mark the code that judges: the version does not tell two checkouts apart."""
    code = b"".join(Path(file).read_bytes() for file in (__file__, changes.__file__))
    return f"{own_version()} {hashlib.sha256(code).hexdigest()}"


def find_series(
    measured: Iterable[RunMeans], heads: Sequence[RunHead], metrics: Sequence[str] = JUDGED_METRICS
) -> tuple[Series, ...]:
    """Sort runs into series, and judge each night by night.

    Args:
        measured: oldest first.
        heads: of all runs of the store, which decide on subjects, nights and the branch.
    """
    means, runs = {}, {}
    for one in measured:
        means[one.run.id], runs[one.run.id] = one.means, one.run
    placed = PlacedRuns.of(heads)
    return _judge(placed.subjects, means, placed, metrics, lambda _: runs)


@dataclass(frozen=True, slots=True)
class PlacedRuns:
    """All runs of a store over time.

    Attributes:
        subjects: runs by their subject's id, oldest first.
        nights: the first run of each run's night; both by id.
        branch: the main one.
    """

    subjects: Mapping[str, Sequence[RunHead]]
    nights: Mapping[str, str]
    branch: str | None

    @classmethod
    def of(cls, heads: Sequence[RunHead]) -> "PlacedRuns":
        """Place runs, oldest first."""
        nights = {head.id: night[0].id for night in group_nights(heads) for head in night}
        subjects = defaultdict[str, list[RunHead]](list)
        for head in heads:
            subjects[head.subject].append(head)
        return cls(subjects, nights, find_main_branch(heads))


def _judge(
    subjects: Iterable[str],
    means: Mapping[str, Mapping[str, float]],
    placed: PlacedRuns,
    metrics: Sequence[str],
    read: Callable[[Collection[str]], Mapping[str, Run]],
) -> tuple[Series, ...]:
    """Judge the histories of some runs.

    Args:
        means: of these, by run and metric.
        read: reads runs by their ids.
    """
    heads_of = {
        subject: [
            head
            for head in placed.subjects.get(subject, ())
            if head.has_history and not means.get(head.id, _NONE).keys().isdisjoint(metrics)
        ]
        for subject in subjects
    }
    strays = find_strays(chain.from_iterable(heads_of.values()), placed.branch)
    series: list[Series] = []
    for subject, heads in heads_of.items():
        keys = {key for head in heads for key in means[head.id]}
        branch = choose_branch([head.branch for head in heads], placed.branch)
        nights: dict[tuple[str, str], list[RunHead]] = {}
        apart: dict[tuple[str, str], list[RunHead]] = {}
        for head in heads:
            if (head.branch or branch) == branch:
                where = apart if head.id in strays else nights
                where.setdefault((placed.nights[head.id], head.sha256), []).append(head)
        for metric in (find_metric(key) for key in metrics if key in keys):
            measured_nights = _nights(nights.values(), means, metric.key)
            if measured_nights:
                off = _nights(apart.values(), means, metric.key)
                series.append(Series(subject, metric, measured_nights, apart=off))
    judgements = judge_all([_history(one) for one in series])
    judged = [_with_changes(one, judged) for one, judged in zip(series, judgements, strict=True)]
    runs = read({run_id for one in judged for run_id in one.runs_to_show()})
    there = [one for one in judged if runs.keys() >= set(one.runs_to_show())]  # others are pruned
    return _sort((replace(one, runs=runs) for one in there), metrics)


def _sort(series: Iterable[Series], metrics: Sequence[str]) -> tuple[Series, ...]:
    order = {key: number for number, key in enumerate(metrics)}
    return tuple(sorted(series, key=lambda one: (order[one.metric.key], one.name)))


def _with_changes(series: Series, judged: SeriesJudgement) -> Series:
    """Give a series the changes that count, each with the ratio of its levels."""
    least = PERPLEXITY_THRESHOLD if Use.EXACT in series.metric.use else 0.0
    standing = [
        change
        for change in judged.changes
        if change.refuted is None and abs(series.metric.gain(change.ratio)) > least
    ]
    return replace(
        series,
        changes=tuple(
            replace(one, ratio=_ratio(series, one, series.levels_beside(one, standing)))
            for one in standing
        ),
        refuted=tuple(change for change in judged.changes if change.refuted is not None),
        smallest_loss=_as_loss(series.metric, judged.smallest_loss),
        unit=judged.unit,
        wandering=judged.wandering,
    )


def _as_loss(metric: Metric, part: float | None) -> float | None:
    """Return the loss of a metric: times that double are speeds that halve."""
    if part is None or metric.direction is Direction.HIGHER:
        return part
    return part / (1 - part)


def _moved(changes: Iterable[Change], nights: int) -> tuple[Change, ...]:
    """Return the changes that are seen where the first nights are left out."""
    return tuple(
        replace(
            one,
            night=one.night - nights,
            found=one.found - nights,
            refuted=None if one.refuted is None else one.refuted - nights,
        )
        for one in changes
        if one.night > nights
    )


def _ratio(series: Series, change: Change, levels: Levels) -> float:
    """Return the new level over the old one, each the median of its nights next to the change.

    Each device is held against itself, where it measured before and since. What was seen when the
    change was found stands as long as the levels say the opposite.
    """
    before, since = levels
    if not before or not since:
        return change.ratio
    ratio = math.exp(statistics.median(night_logs(before, since)[1]))
    return ratio if (series.metric.gain(ratio) < 0) == change.is_loss else change.ratio


def night_logs(
    past: Sequence[MeasuredNight], present: Sequence[MeasuredNight]
) -> tuple[list[float], list[float]]:
    """Return the logarithm of each night, less the level that each of its devices had in the past.

    Without a device that has one, the present has the night's own mean less that of the past.
    """
    logs: dict[str, list[float]] = {}
    for session in (session for night in past for session in night.sessions):
        logs.setdefault(session.head.device, []).append(math.log(session.value))
    levels = {serial: statistics.median(some) for serial, some in logs.items()}
    level = statistics.median(math.log(night.mean) for night in past)

    def deviation(night: MeasuredNight) -> float:
        known = [
            math.log(session.value) - levels[session.head.device]
            for session in night.sessions
            if session.head.device in levels
        ]
        return statistics.fmean(known) if known else math.log(night.mean) - level

    return [deviation(night) for night in past], [deviation(night) for night in present]


def _drifts(series: Series) -> Iterator[Drift]:
    """Yield the changes of a series since some time ago, where it was measured then."""
    at = [night.at for night in series.nights]
    end, level = at[-1], timedelta(days=LEVEL_NIGHTS)
    last = range(max(bisect_right(at, end - level), len(at) - LEVEL_NIGHTS), len(at))
    wandering: tuple[float, ...] = ()
    for days in AGES:
        middle = end - timedelta(days=days)
        begin = bisect_left(at, middle - level / 2)
        first = range(begin, min(bisect_right(at, middle + level / 2), begin + LEVEL_NIGHTS))
        past, now = (series.nights[span.start : span.stop] for span in (first, last))
        devices = {name for night in past for name in night.devices}
        devices &= {name for night in now for name in night.devices}
        before, since = (
            [night for night in (one.of(devices) for one in nights) if night.sessions]
            for nights in (past, now)
        )
        if not devices or min(len(before), len(since)) < MIN_BEFORE:
            continue
        logs = night_logs(before, since)
        if not wandering:
            together = go_together([math.log(night.mean) for night in series.nights])
            wandering = (together,) * LEVEL_NIGHTS
        half = half_width(*logs, wandering, series.unit, caution=1.0)
        told = math.prod(
            one.ratio
            for one in series.changes
            if one.night >= first.stop and one.concerns(sorted(devices))
        )
        ratio = math.exp(statistics.median(logs[1]) - statistics.median(logs[0]))
        if half is not None:
            yield Drift(series.metric, days, ratio, half, told)


def describe_drifts(series: Iterable[Series]) -> tuple[str, ...]:
    """Say which levels have become worse slowly, beyond noise and what was told, worst first."""
    lines = []
    for one in series:
        slow = [drift for drift in one.drifts if drift.is_untold]
        if slow:
            worst = min(slow, key=lambda drift: one.metric.gain(drift.ratio))
            lines.append((one.metric.gain(worst.ratio), f"{one.name}: {one.metric.label} {worst}"))
    return tuple(text for _, text in sorted(lines))


def _select(wanted: SeriesFilter) -> Select[Any]:
    runs = schema.runs.c
    query = select(schema.runs).where(
        runs.status == "done", runs.check_outcome != "failed", runs.label.not_in(SIDES)
    )
    if wanted.model is not None:
        query = query.where(runs.model == wanted.model)
    if wanted.branch is not None:
        query = query.where(runs.git_branch == wanted.branch)
    return query


def _is_wanted(series: Series, wanted: SeriesFilter) -> bool:
    if wanted.since is not None and series.nights[-1].at < wanted.since:
        return False
    if wanted.device is None:
        return True
    device = series.newest.device  # all of a series are of one maker, model and SoC
    serials = {serial for night in series.nights for serial in night.devices}
    words = " ".join((device.soc, device.manufacturer or "", device.model or "", *serials))
    return wanted.device.lower() in words.lower()


def _nights(
    nights: Iterable[Sequence[RunHead]], means: Mapping[str, Mapping[str, float]], key: str
) -> tuple[MeasuredNight, ...]:
    """Return the nights in which a metric was measured."""
    result = []
    for night in nights:
        sessions = [
            MeasuredSession(head, mean)
            for head in night
            if 0 < (mean := means[head.id].get(key, 0.0)) < math.inf
        ]
        if sessions:
            result.append(MeasuredNight(night[0].created_at, tuple(sessions)))
    return tuple(result)


def plan_series(series: Series, loss: float) -> int | None:
    """Return the sessions a night that would show a loss in time; see `plan_sessions`."""
    since = series.changes[-1].night if series.changes else 0
    return plan_sessions(_history(replace(series, nights=series.nights[since:])), loss)


def _smallest(metric: Metric) -> float:
    """Return the change that counts: of a metric without noise a smaller one."""
    return PERPLEXITY_THRESHOLD if Use.EXACT in metric.use else SMALLEST


def _history(series: Series) -> History:
    placed = [
        (number, session)
        for number, night in enumerate(series.nights)
        for session in night.sessions
    ]
    has_noise = Use.EXACT not in series.metric.use
    return History(
        values=[session.value for _, session in placed],
        nights=[number for number, _ in placed],
        devices=[session.head.device for _, session in placed],
        higher_is_better=series.metric.direction is Direction.HIGHER,
        smallest=_smallest(series.metric),
        heat=[start_temperature(one.head.conditions) for _, one in placed] if has_noise else (),
    )
