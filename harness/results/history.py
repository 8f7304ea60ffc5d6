"""Histories: the same measurement night after night, with its changes.

A series has one metric of one workload on one container and model of device, whatever the
container's hash and whichever phone. Containers of a plan are told apart by their labels. Its
nights hold the sessions of one commit and container that began within twelve hours. Runs with a
failed output check, both sides of comparisons and warm-ups are left out.

`read_series` and `find_series` are the only makers of histories: `qnnfarm history`, alerts, nightly
jobs and reports all show these.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

from sqlalchemy import Select, func, select

from harness.results import schema
from harness.results.comparison import COMPARABLE_METRICS
from harness.results.identity import (
    SpeedKey,
    container_name,
    container_shape,
    describe_container,
    device_name,
    place,
)
from harness.results.means import RunMeans, read_means
from harness.results.metrics import Direction, Metric, find_metric
from harness.results.nights import group_nights
from harness.results.records import SIDES, Run
from harness.results.statistics.changes import SMALLEST, Change, History, detect_all
from harness.results.store import ResultsStore

JUDGED_METRICS = (*COMPARABLE_METRICS, "perplexity")
"""The metrics whose changes are looked for by default."""
_SMALLEST: Mapping[str, float] = {"perplexity": 0.005}
"""Metrics without noise, in which smaller changes count."""
_NONE = (None, None, None)


@dataclass(frozen=True, slots=True)
class Session:
    """A run in a history.

    Attributes:
        value: mean of the measured repetitions, in the metric's unit.
    """

    measured: RunMeans
    value: float

    @property
    def run(self) -> Run:
        """The run, without its measurements."""
        return self.measured.run

    @property
    def commit(self) -> str | None:
        """The commit that was measured."""
        return self.run.provenance.git_commit

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts that may change from night to night, in words: versions, the container's hash."""
        source, device = self.run.provenance, self.run.device
        facts = {
            "container": self.run.container.sha256[:12],
            "qnnfarm": source.qnnfarm_version,
            "Android": device.android_version,
            "build": device.build_fingerprint,
            **source.toolchain_versions,
            **source.library_versions,
        }
        return {name: value for name, value in facts.items() if value}


@dataclass(frozen=True, slots=True)
class Night:
    """Sessions of one commit and container that began within twelve hours.

    Attributes:
        at: when the first run of that night began, whatever it measured.
    """

    at: datetime
    sessions: tuple[Session, ...]

    @property
    def commit(self) -> str | None:
        """The commit of all of them."""
        return self.sessions[0].commit

    @property
    def mean(self) -> float:
        """Mean of the sessions."""
        return math.fsum(session.value for session in self.sessions) / len(self.sessions)


@dataclass(frozen=True)
class Series:
    """One history with its changes.

    Attributes:
        subject: id of the container, device and workload; the series of its metrics share it.
        changes: those that stand; their nights are places in `nights`.
        refuted: those that later nights have refuted.
    """

    subject: str
    metric: Metric
    nights: tuple[Night, ...]
    changes: tuple[Change, ...] = ()
    refuted: tuple[Change, ...] = ()

    @property
    def id(self) -> str:
        """Stable: of the metric and of what is equal in all runs."""
        return f"{self.subject}-{self.metric.key}"

    @property
    def newest(self) -> Run:
        """The last run, which names the container, device and workload of all."""
        return self.nights[-1].sessions[-1].run

    @cached_property
    def name(self) -> str:
        """Container, workload and device in one line."""
        device = device_name(self.newest).partition(", Android")[0]
        where = place(self.newest)
        where = f"{where} ({device})" if device and device != where else where
        label = SpeedKey.of(self.newest).label
        named = _container_label(self.newest.label)
        container = describe_container(self.newest.container)
        return (
            f"{named}: {container}, {label} on {where}"
            if named
            else f"{container}, {label} on {where}"
        )

    @cached_property
    def title(self) -> str:
        """A shorter name: `Llama-3.2-1B W4A16 on SM8750, pp512+tg128`."""
        run = self.newest
        own = (f"{key}={value}" for key, value in run.labels.items())
        parts = (SpeedKey.of(run).label, _container_label(run.label), *own)
        where = f"{container_name(run.container)} on {place(run)}"
        return ", ".join((where, *filter(None, parts)))

    @property
    def shape(self) -> str:
        """Shapes of the graphs: `AR 1, 128, CL 4096`."""
        return container_shape(self.newest.container)

    @property
    def emulator(self) -> bool:
        """True where it was measured on the emulator."""
        return self.newest.device.emulator

    def commits(self, change: Change) -> tuple[str | None, str | None]:
        """Return the last commit before a change, and the first one with it."""
        return self.nights[change.night - 1].commit, self.nights[change.night].commit

    def differences(self, change: Change) -> tuple[str, ...]:
        """Say what else changed between the two nights: containers, libraries, builds of phones."""
        before, after = self.nights[change.night - 1], self.nights[change.night]
        was, now = _facts(before), _facts(after)
        return tuple(
            f"{name} {', '.join(sorted(was[name]))} → {', '.join(sorted(now[name]))}"
            for name in sorted(was.keys() & now.keys())
            if was[name].isdisjoint(now[name])
        )

    def levels(self) -> tuple[tuple[int, int, float], ...]:
        """Return first night, last night and median of each stretch between changes."""
        edges = [0, *(change.night for change in self.changes), len(self.nights)]
        return tuple(
            (first, end - 1, statistics.median([night.mean for night in self.nights[first:end]]))
            for first, end in pairwise(edges)
            if end > first
        )


@dataclass(frozen=True, slots=True)
class SeriesFilter:
    """Filter of histories; `None` matches every run.

    Attributes:
        metrics: keys of the registry.
        model: of the container.
        device: a part of the SoC's, maker's or model's name or of the serial, in any case.
        until: created before.
    """

    metrics: Sequence[str] = JUDGED_METRICS
    model: str | None = None
    device: str | None = None
    branch: str | None = None
    since: datetime | None = None
    until: datetime | None = None


_EVERYTHING = SeriesFilter()


def read_series(store: ResultsStore, wanted: SeriesFilter = _EVERYTHING) -> tuple[Series, ...]:
    """Read all histories of a store, each judged night by night.

    Raises:
        UnknownMetricError: there is no such metric.
        CorruptRunError: qnnfarm cannot have written one of the runs.
    """
    metrics = tuple(find_metric(key).key for key in wanted.metrics)
    return find_series(read_means(store.database, _select(wanted), metrics), metrics)


def find_series(
    measured: Iterable[RunMeans], metrics: Sequence[str] = JUDGED_METRICS
) -> tuple[Series, ...]:
    """Sort runs into series, and judge each night by night.

    Args:
        measured: oldest first.
    """
    subjects: dict[str, list[RunMeans]] = {}
    for one in measured:
        if _has_history(one.run) and not one.means.keys().isdisjoint(metrics):
            subjects.setdefault(_identity(one.run), []).append(one)
    series: list[Series] = []
    for identity, runs in subjects.items():
        subject = hashlib.sha256(identity.encode()).hexdigest()[:16]
        nights = group_nights(
            runs,
            lambda one: one.run.created_at,
            lambda one: (one.run.provenance.git_commit, one.run.container.sha256),
        )
        by_metric = ((find_metric(key), _nights(nights, key)) for key in metrics)
        series += [Series(subject, metric, found) for metric, found in by_metric if found]
    changes = detect_all([_history(one) for one in series])
    judged = (
        replace(
            one,
            changes=tuple(change for change in found if change.refuted is None),
            refuted=tuple(change for change in found if change.refuted is not None),
        )
        for one, found in zip(series, changes, strict=True)
    )
    order = {key: number for number, key in enumerate(metrics)}
    return tuple(sorted(judged, key=lambda one: (order[one.metric.key], one.name)))


def _select(wanted: SeriesFilter) -> Select[Any]:
    runs = schema.runs.c
    query = select(schema.runs).where(
        runs.status == "done", runs.check_outcome != "failed", runs.label.not_in(SIDES)
    )
    if wanted.model is not None:
        query = query.where(runs.model == wanted.model)
    if wanted.branch is not None:
        query = query.where(runs.git_branch == wanted.branch)
    if wanted.since is not None:
        query = query.where(runs.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(runs.created_at < wanted.until)
    if wanted.device is not None:
        maker, model = (
            func.coalesce(name, "") for name in (runs.device_manufacturer, runs.device_model)
        )
        names = func.lower(runs.soc + " " + maker + " " + model + " " + runs.device_serial)
        query = query.where(names.contains(wanted.device.lower(), autoescape=True))
    return query


def _has_history(run: Run) -> bool:
    return run.status == "done" and run.check.outcome != "failed" and run.label not in SIDES


def _identity(run: Run) -> str:
    """Return what is equal in all runs of a series; to add to it changes the ids of all series."""
    container, device, work = run.container, run.device, run.workload
    definition = work.perplexity
    parts = (
        run.kind, container.model, container.precision, container.target, container.ars,
        container.cl, container.n_splits, run.labels,
        device.soc, device.emulator, device.manufacturer, device.model, device.abi,
        work.runner, work.prompt_tokens, work.depth_tokens, work.max_new_tokens, work.prompt,
        work.prompt_sha256, work.sampler, work.dataset_sha256,
        *((definition.positions, definition.windows, definition.tokens) if definition else _NONE),
        run.provenance.host if device.emulator else "",
        _container_label(run.label),
        (run.concurrent_sessions or 1) > 1,
    )  # fmt: skip
    return json.dumps(parts, sort_keys=True, default=str)


def _container_label(label: str) -> str:
    """Return the container's label in a plan, from a cell's; a plan may hold several alike."""
    container, _, rest = label.partition("/")
    return container if rest else ""


def _nights(nights: Iterable[Sequence[RunMeans]], key: str) -> tuple[Night, ...]:
    """Return the nights in which a metric was measured."""
    found = []
    for night in nights:
        means = [(one, one.means[key].value) for one in night if key in one.means]
        sessions = tuple(Session(one, value) for one, value in means if 0 < value < math.inf)
        if sessions:
            found.append(Night(night[0].run.created_at, sessions))
    return tuple(found)


def _facts(night: Night) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for session in night.sessions:
        for name, value in session.facts.items():
            found.setdefault(name, set()).add(value)
    return found


def _history(series: Series) -> History:
    placed = [
        (number, session)
        for number, night in enumerate(series.nights)
        for session in night.sessions
    ]
    return History(
        values=[session.value for _, session in placed],
        nights=[number for number, _ in placed],
        devices=[session.run.device.serial for _, session in placed],
        higher_is_better=series.metric.direction is Direction.HIGHER,
        smallest=_SMALLEST.get(series.metric.key, SMALLEST),
    )
