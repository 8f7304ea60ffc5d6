"""Upkeep of a results database: its inventory, removal of old runs, release of disk space.

Old runs, or their telemetry, are removed a few at a time, so that writers get their turns. What
belongs together goes together: a group (the sessions of a cell, both sides of a comparison) goes
when its newest run is old enough and none is under way, so that no report ever says something else
about half a group. Runs that later verdicts need stay: finished perplexities, which benchmarks are
checked against (`harness.workloads.quality.stored_quality`), and the nights before and since
the losses of unsettled alerts.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import astuple, dataclass, field
from datetime import UTC, date, datetime
from functools import partial
from operator import add
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, func, not_, select, union
from sqlalchemy.engine.interfaces import DBAPICursor

from harness.errors import StoreError
from harness.results import schema
from harness.results.alerts import UNSETTLED, Alert
from harness.results.artifacts import ArtifactFolder
from harness.results.database import ResultsDatabase, refuse_unreadable_rows
from harness.results.history import LEVEL_NIGHTS
from harness.results.nights import find_main_branch, find_strays, group_nights
from harness.results.provenance import has_ended
from harness.results.records import RunHead, runtime_of

GROUPS_AT_ONCE = 20
"""Groups that one transaction removes: milliseconds, where writers wait for half a minute."""
PAUSE_S = 0.15
"""Between transactions; waiting SQLite writers try for the lock every 0.1 s."""
_INCREMENTAL = 2
_PAGES_AT_ONCE = 2000
_RUN_UNDER_WAY = (
    "a run is under way: later results take the free space, and a prune while no run is under way "
    "gives it to the disk"
)
_ON_SERVER = "the server keeps the space for later results; its VACUUM FULL gives it to the disk"


@dataclass(frozen=True, slots=True)
class InventoryRow:
    """The runs of one container by one runtime on one device on one day.

    Attributes:
        day: in UTC.
        labels: the user's own, in words.
        runtime: empty for runs of another tool.
        sessions: runs of a group in one session count as one.
        done: how many of the runs have a result.
        telemetry_bytes: as stored.
    """

    day: date
    model: str
    precision: str | None
    ars: tuple[int, ...]
    labels: str
    runtime: str
    cl: int
    container_sha256: str
    device_serial: str
    soc: str
    emulator: bool
    sessions: int
    runs: int
    done: int
    telemetry_bytes: int


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The space that a database takes.

    Attributes:
        total_bytes: on the disk of its host.
        free_bytes: of that, what later results take first; a server does not report it.
    """

    total_bytes: int
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """Selection of runs to remove.

    Attributes:
        before: removes groups whose newest run was created before this time; with its time zone.
        only_telemetry: keeps runs and measurements.
        alerts: those of losses that are not in the database yet; their nights stay, too.
    """

    before: datetime
    only_telemetry: bool = False
    alerts: Sequence[Alert] = ()


@dataclass(frozen=True, slots=True)
class PruneCounts:
    """Amount that was removed, or would be.

    Attributes:
        artifacts: files that were kept with runs.
    """

    runs: int = 0
    measurements: int = 0
    telemetry: int = 0
    telemetry_bytes: int = 0
    artifacts: int = 0

    def __add__(self, other: "PruneCounts") -> "PruneCounts":
        return PruneCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """Older runs that `prune` keeps for later verdicts."""

    perplexities: int = 0
    of_alerts: int = 0


def list_inventory(database: ResultsDatabase) -> tuple[InventoryRow, ...]:
    """List the runs by day, container, runtime and device, the oldest day first."""
    runs, telemetry = schema.runs.c, schema.telemetry.c
    columns = (
        runs.created_at, runs.model, runs.precision, runs.ars, runs.labels, runs.sampler,
        runs.origin_tool, runs.cl,
        runs.container_sha256, runs.device_serial, runs.soc, runs.emulator,
    )  # fmt: skip
    query = select(*columns, runs.id, runs.group_id, runs.session, runs.status)
    by_run = select(telemetry.run_id, func.sum(func.length(telemetry.samples)))
    sums: dict[_InventoryKey, _Sum] = defaultdict(_Sum)
    with database.reading() as connection, refuse_unreadable_rows(database.location):
        sizes = {row[0]: row[1] for row in connection.execute(by_run.group_by(telemetry.run_id))}
        for row in connection.execute(query):
            created_at, model, precision, ars, labels, settings, origin, *key = row[:-4]
            run_id, group_id, session, status = row[-4:]
            words = ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
            day, runtime = created_at.astimezone(UTC).date(), "" if origin else runtime_of(settings)
            entry = sums[day, model, precision, tuple(ars), words, runtime, *key]
            entry.sessions.add((group_id, session))
            entry.runs += 1
            entry.done += status == "done"
            entry.telemetry_bytes += int(sizes.get(run_id) or 0)
    return tuple(
        InventoryRow(*key, len(entry.sessions), entry.runs, entry.done, entry.telemetry_bytes)
        for key, entry in sorted(sums.items(), key=lambda item: tuple(map(str, item[0])))
    )


_InventoryKey = tuple[date, str, str | None, tuple[int, ...], str, str, int, str, str, str, bool]


@dataclass(slots=True)
class _Sum:
    sessions: set[tuple[str, int]] = field(default_factory=set)
    runs: int = 0
    done: int = 0
    telemetry_bytes: int = 0


def count_prunable(database: ResultsDatabase, policy: PrunePolicy) -> PruneCounts:
    """Count the rows that `prune` would remove now."""
    with database.reading() as connection:
        batches = _batches(connection, policy)
        return sum((_count(connection, groups, policy) for groups in batches), PruneCounts())


def count_kept(database: ResultsDatabase, policy: PrunePolicy) -> KeptCounts:
    """Count the older runs that `prune` keeps."""
    runs = schema.runs.c
    old = select(runs.group_id, _is_kept()).where(runs.created_at < policy.before)
    with database.reading() as connection:
        needed = _groups_of_alerts(connection, policy.alerts)
        rows = connection.execute(old).all()
    scored = sum(is_perplexity for _, is_perplexity in rows)
    return KeptCounts(scored, sum(group in needed and not kept for group, kept in rows))


def prune(database: ResultsDatabase, policy: PrunePolicy) -> Generator[PruneCounts, None, None]:
    """Remove old runs, or just their telemetry, as the generator is consumed.

    Yields the counts of each short transaction, after it has ended; others write in between.
    Finished perplexities stay, and so does a group of an unsettled alert, with a newer run, or with
    one that is under way.
    """
    with database.reading() as connection:
        batches = _batches(connection, policy)
    for number, batch in enumerate(batches):
        if number:
            time.sleep(PAUSE_S)
        counts = database.insist(partial(_remove, policy=policy, batch=batch))
        yield counts or PruneCounts()


def _remove(connection: Connection, policy: PrunePolicy, batch: Sequence[str]) -> PruneCounts:
    """Prune some groups, without those that have a new run."""
    groups = _old_groups(connection, policy, batch)
    counts = _count(connection, groups, policy)
    if policy.only_telemetry:
        ids = select(schema.runs.c.id).where(schema.runs.c.group_id.in_(groups))
        for table in (schema.telemetry, schema.artifacts):
            connection.execute(delete(table).where(table.c.run_id.in_(ids)))
    else:  # measurements, telemetry and artifacts go with their runs
        connection.execute(delete(schema.runs).where(_is_removed(groups)))
        comparisons = schema.comparisons
        connection.execute(delete(comparisons).where(comparisons.c.group_id.in_(groups)))
    return counts


def sweep_artifacts(database: ResultsDatabase) -> int:
    """Remove the contents of artifacts that no run names any more; return the bytes."""
    with database.reading() as connection:
        in_use = frozenset(connection.scalars(select(schema.artifacts.c.sha256).distinct()))
    return ArtifactFolder.of(database.location).sweep(in_use)


def disk_usage(database: ResultsDatabase) -> DiskUsage:
    """Measure the space that the tables take; of a file, the whole file."""
    with database.reading() as connection:
        return _disk_usage(connection)


def free_disk_space(database: ResultsDatabase) -> str:
    """Give the free space of a SQLite file to the disk; return why not, or an empty string.

    The first time the whole file is written anew, which locks writers out for as long and is done
    only while no run is under way. From then on it is done a piece at a time, between writers.
    """
    if not database.is_file:
        return _ON_SERVER
    try:
        with database.reading() as connection:
            if not _disk_usage(connection).free_bytes:
                return ""
            is_in_use = _has_running(connection)
        with database.cursor() as cursor:
            if _number(cursor, "auto_vacuum") == _INCREMENTAL:
                _free_in_pieces(cursor)
            elif is_in_use:
                return _RUN_UNDER_WAY
            else:
                cursor.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
                cursor.execute("VACUUM")
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            cursor.fetchall()
    except StoreError as error:  # the disk may lack the space for the new file
        return str(error)
    return ""


def _disk_usage(connection: Connection) -> DiskUsage:
    if connection.dialect.name != "sqlite":
        sizes = (func.pg_total_relation_size(name) for name in schema.metadata.tables)
        return DiskUsage(sum(connection.scalar(select(size)) or 0 for size in sizes))
    page, pages, free = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_size", "page_count", "freelist_count")
    )
    return DiskUsage(page * pages, page * free)


def _has_running(connection: Connection) -> bool:
    """Return whether a process writes a run, or may do so on another host."""
    table = schema.runs
    writers = select(table.c.writer, table.c.created_at).where(table.c.status == "running")
    return any(not has_ended(*writer) for writer in connection.execute(writers))


def _free_in_pieces(cursor: DBAPICursor) -> None:
    free_pages = _number(cursor, "freelist_count")
    while free_pages:
        cursor.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")
        cursor.fetchall()
        before, free_pages = free_pages, _number(cursor, "freelist_count")
        if free_pages >= before:
            return
        time.sleep(PAUSE_S)


def _number(cursor: DBAPICursor, name: str) -> int:
    cursor.execute(f"PRAGMA {name}")
    rows = cursor.fetchall()
    return int(rows[0][0])


def _batches(connection: Connection, policy: PrunePolicy) -> list[Sequence[str]]:
    needed = frozenset[str]()
    if not policy.only_telemetry:
        needed = _groups_of_alerts(connection, policy.alerts)
    groups = [group for group in _old_groups(connection, policy) if group not in needed]
    return [groups[n : n + GROUPS_AT_ONCE] for n in range(0, len(groups), GROUPS_AT_ONCE)]


def _old_groups(
    connection: Connection, policy: PrunePolicy, among: Sequence[str] | None = None
) -> Sequence[str]:
    """Return the groups that the policy takes from, oldest first; of all, or of `among`."""
    table = schema.runs
    newest = func.max(table.c.created_at)
    holds = select(table.c.group_id)
    if policy.only_telemetry:
        run_ids = union(select(schema.telemetry.c.run_id), select(schema.artifacts.c.run_id))
        holds = holds.where(table.c.id.in_(run_ids))
    else:
        holds = holds.where(not_(_is_kept()))
    query: Select[Any] = select(table.c.group_id).where(table.c.group_id.in_(holds))
    query = query.group_by(table.c.group_id)
    running_runs = select(table.c.group_id, table.c.writer, table.c.created_at).where(
        table.c.status == "running"
    )
    if among is not None:
        query = query.where(table.c.group_id.in_(among))
        running_runs = running_runs.where(table.c.group_id.in_(among))
    old = query.having(newest < policy.before).order_by(newest, table.c.group_id)
    busy = {group for group, *writer in connection.execute(running_runs) if not has_ended(*writer)}
    return [group for group in connection.scalars(old) if group not in busy]


def _groups_of_alerts(connection: Connection, new: Sequence[Alert]) -> frozenset[str]:
    """Return the groups with the nights that unsettled alerts are judged by, new ones included."""
    alerts, runs = schema.alerts.c, schema.runs.c
    unsettled = select(alerts.series, alerts.metric, alerts.began_at).where(
        alerts.state.in_(UNSETTLED)
    )
    losses = defaultdict[str, list[datetime]](list)
    for alert in new:
        if alert.state in UNSETTLED:
            losses[alert.subject].append(alert.began_at)
    for series, metric, began_at in connection.execute(unsettled):
        losses[series.removesuffix(f"-{metric}")].append(began_at)
    needed = set[str]()
    for subject, began in losses.items():
        # A head for each group is enough: its id tells what is kept.
        query = select(runs.group_id, runs.created_at, runs.git_commit, runs.git_branch)
        rows = connection.execute(query.where(runs.subject == subject))
        heads = [RunHead(*row) for row in rows]
        branch = find_main_branch(heads)
        strays = find_strays(heads, branch)
        on_branch = (head for head in heads if head.branch in {None, branch})
        nights = group_nights(head for head in on_branch if head.id not in strays)
        at = [night[0].created_at for night in nights]
        for moment in began:
            first = bisect_left(at, moment)
            near = nights[max(first - LEVEL_NIGHTS, 0) : first + LEVEL_NIGHTS]
            needed |= {head.id for night in near for head in night}
    return frozenset(needed)


def _is_kept() -> ColumnElement[bool]:
    return and_(schema.runs.c.kind == "perplexity", schema.runs.c.status == "done")


def _is_removed(groups: Sequence[str]) -> ColumnElement[bool]:
    return and_(schema.runs.c.group_id.in_(groups), not_(_is_kept()))


def _count(connection: Connection, groups: Sequence[str], policy: PrunePolicy) -> PruneCounts:
    runs, telemetry, measurements = schema.runs, schema.telemetry, schema.measurements
    condition = runs.c.group_id.in_(groups) if policy.only_telemetry else _is_removed(groups)
    ids = select(runs.c.id).where(condition)
    telemetry_size = select(func.count(), func.sum(func.length(telemetry.c.samples))).where(
        telemetry.c.run_id.in_(ids)
    )
    repetitions, size = connection.execute(telemetry_size).one()
    artifacts = schema.artifacts
    files = select(func.count()).select_from(artifacts).where(artifacts.c.run_id.in_(ids))
    counts = PruneCounts(
        telemetry=repetitions,
        telemetry_bytes=int(size or 0),
        artifacts=connection.scalar(files) or 0,
    )
    if policy.only_telemetry:
        return counts
    values = select(func.count()).select_from(measurements).where(measurements.c.run_id.in_(ids))
    return counts + PruneCounts(
        runs=connection.scalar(select(func.count()).select_from(runs).where(condition)) or 0,
        measurements=connection.scalar(values) or 0,
    )
