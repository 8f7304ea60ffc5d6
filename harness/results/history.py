"""Histories of a store: the same measurement night after night, with its changes.

A series has one metric of one workload on one container and model of device, whatever the
container's hash and whichever phone. Containers of a plan are told apart by their labels. Its
nights hold the sessions of one commit that began within twelve hours. Runs with a failed output
check, both sides of comparisons and warm-ups are left out.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any

from sqlalchemy import RowMapping, Select, func, select

from harness.results import schema
from harness.results.changes import SMALLEST, Change, History, detect_all
from harness.results.comparison import COMPARABLE_METRICS, SIDES
from harness.results.database import refuse_unreadable_rows
from harness.results.identity import SpeedKey, describe_container, device_name, place
from harness.results.metrics import Direction, Metric, find_metric
from harness.results.records import Run
from harness.results.store import ResultsStore

JUDGED_METRICS = (*COMPARABLE_METRICS, "perplexity")
"""The metrics whose changes are looked for by default."""
NIGHT = timedelta(hours=12)
_SMALLEST: Mapping[str, float] = {"perplexity": 0.005}
"""Metrics without noise, in which smaller changes count."""

_IDENTITY = (
    "kind", "model", "precision", "target", "ars", "cl", "n_splits", "labels",
    "soc", "emulator", "device_manufacturer", "device_model", "abi",
    "runner", "prompt_tokens", "depth_tokens", "max_new_tokens", "prompt", "prompt_sha256",
    "sampler", "dataset_sha256", "perplexity_positions", "perplexity_windows",
    "perplexity_tokens",
)  # fmt: skip
"""Columns of runs that are equal in a series. To add one changes the ids of all series."""
_FACTS = (
    "id", "created_at", "label", "device_serial", "git_commit", "git_branch", "host",
    "concurrent_sessions", "container_sha256", "qnnfarm_version", "android_version",
    "build_fingerprint", "toolchain_versions", "library_versions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Session:
    """A run in a history.

    Attributes:
        value: mean of the measured repetitions, in the metric's unit.
        facts: what may change from night to night, in words: versions, the container's hash.
    """

    run_id: str
    at: datetime
    value: float
    device: str
    commit: str | None
    branch: str | None
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Night:
    """Sessions of one commit that began within twelve hours."""

    sessions: tuple[Session, ...]

    @property
    def at(self) -> datetime:
        """When the first of them began."""
        return self.sessions[0].at

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
        id: stable: of the metric and what is equal in all runs.
        newest: the last run, which names the container, device and workload of all.
        changes: their nights are places in `nights`.
    """

    id: str
    metric: Metric
    newest: Run
    nights: tuple[Night, ...]
    changes: tuple[Change, ...] = ()

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

    def commits(self, change: Change) -> tuple[str | None, str | None]:
        """The last commit before a change, and the first one with it."""
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
        """First night, last night and median of each stretch between changes."""
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
    metrics = {key: find_metric(key) for key in wanted.metrics}
    with store.database.reading() as connection, refuse_unreadable_rows(store.location):
        rows = connection.execute(_select(wanted)).mappings().all()
    grouped: dict[tuple[str, str], list[RowMapping]] = {}
    ids: dict[str, str] = {}
    for row in rows:
        if 0 < row["value"] < math.inf:
            identity = _identity(row)
            if identity not in ids:
                ids[identity] = hashlib.sha256(identity.encode()).hexdigest()[:16]
            grouped.setdefault((row["metric"], ids[identity]), []).append(row)
    runs = {run_id: store.get_run(run_id) for run_id in {g[-1]["id"] for g in grouped.values()}}
    series = [
        Series(f"{group}-{key}", metrics[key], runs[found[-1]["id"]], _nights(found))
        for (key, group), found in grouped.items()
    ]
    changes = detect_all([_history(one) for one in series])
    judged = [
        Series(one.id, one.metric, one.newest, one.nights, found)
        for one, found in zip(series, changes, strict=True)
    ]
    order = {key: number for number, key in enumerate(metrics)}
    return tuple(sorted(judged, key=lambda one: (order[one.metric.key], one.name)))


def _select(wanted: SeriesFilter) -> Select[Any]:
    runs, measured = schema.runs.c, schema.measurements.c
    query = (
        select(
            *(runs[name] for name in (*_FACTS, *_IDENTITY)),
            measured.metric,
            func.avg(measured.value).label("value"),
        )
        .join(schema.measurements, measured.run_id == runs.id)
        .where(runs.status == "done", runs.check_outcome != "failed", runs.label.not_in(SIDES))
        .where(measured.is_warmup.is_(False), measured.metric.in_(wanted.metrics))
        .group_by(runs.id, measured.metric)
        .order_by(runs.created_at, runs.session, runs.id)
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


def _identity(row: RowMapping) -> str:
    parts = [row[name] for name in _IDENTITY]
    parts.append(row["host"] if row["emulator"] else "")
    parts.append(_container_label(row["label"]))
    parts.append((row["concurrent_sessions"] or 1) > 1)
    return json.dumps(parts, sort_keys=True, default=str)


def _container_label(label: str) -> str:
    """The container's label in a plan, from a cell's; a plan may hold several alike."""
    container, _, rest = label.partition("/")
    return container if rest else ""


def _nights(rows: Iterable[RowMapping]) -> tuple[Night, ...]:
    nights: list[list[Session]] = []
    for row in rows:
        session = Session(
            row["id"], row["created_at"], row["value"], row["device_serial"], row["git_commit"],
            row["git_branch"], _row_facts(row),
        )  # fmt: skip
        last = nights[-1][0] if nights else None
        if last and session.commit == last.commit and session.at - last.at < NIGHT:
            nights[-1].append(session)
        else:
            nights.append([session])
    return tuple(Night(tuple(sessions)) for sessions in nights)


def _row_facts(row: RowMapping) -> Mapping[str, str]:
    facts = {
        "container": row["container_sha256"][:12],
        "qnnfarm": row["qnnfarm_version"],
        "Android": row["android_version"],
        "build": row["build_fingerprint"],
        **(row["toolchain_versions"] or {}),
        **(row["library_versions"] or {}),
    }
    return {name: str(value) for name, value in facts.items() if value}


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
        devices=[session.device for _, session in placed],
        higher_is_better=series.metric.direction is Direction.HIGHER,
        smallest=_SMALLEST.get(series.metric.key, SMALLEST),
    )
