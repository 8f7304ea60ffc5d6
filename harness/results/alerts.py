"""Alerts: losses in histories, each told once and kept until somebody or a recovery settles it.

`assess` finds the alert of every loss, a new one where it has none yet; `review` also keeps them in
the store. Nothing else matches the two. However often the history is judged, the loss stays the
same alert, in any state. When the series recovers at least half of the loss, its
alert is fixed; so it is when later nights refute the loss. Where they refute the recovery, it is
open again.
"""

import hashlib
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal, get_args

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from harness.errors import NotStoredError
from harness.results import schema
from harness.results.database import refuse_unreadable_rows
from harness.results.history import (
    MeasuredNight,
    PlacedRuns,
    Series,
    SeriesFilter,
    iterate_series,
    mark_store,
    mark_subjects,
    read_series,
)
from harness.results.metrics import Metric, find_metric
from harness.results.nights import PAUSE
from harness.results.records import now, to_storable
from harness.results.statistics.changes import Change, scope_of
from harness.results.store import ResultsStore
from harness.words import percent

AlertState = Literal["open", "acknowledged", "fixed", "expected"]
STATES: tuple[AlertState, ...] = get_args(AlertState)
UNSETTLED: frozenset[AlertState] = frozenset({"open", "acknowledged"})
_SAME_NIGHTS = 3
"""Nights by which the place of a loss may move when more of the history is known."""
_NIGHT_APART = timedelta(hours=36)
_FAR_GREATER = 1.5
_RECOVERY = 0.5
"""Part of a loss whose recovery makes it fixed."""
_ALL = ""
"""The subject of the mark of a whole store."""
_RECOVERED = "recovered on "
"""The beginning of the note of a loss that the series itself has fixed."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A loss and its state.

    Attributes:
        id: short, to be typed.
        series: id of the series.
        name: of the series, in words, when the loss was found; before it, as `P3 alone: `, its
            devices, if it has any.
        began_at: the first night at the new level.
        found_at: the night on which it was told apart from noise.
        ratio: new level over old one.
        good_commit, bad_commit: the last commit before, and the first one with the loss.
        note: in words, why it has its state.
        told_at: when somebody was told; None until then.
        devices: serials, as `Change` has them: empty for all.
        backfilled: whether older results than those that were judged last brought it in.
        change: the loss, as the history has it that `assess` judged; None where that shows none.
    """

    id: str
    series: str
    metric: Metric
    name: str
    state: AlertState
    began_at: datetime
    found_at: datetime
    ratio: float
    good_commit: str | None
    bad_commit: str | None
    note: str
    changed_at: datetime
    told_at: datetime | None
    devices: tuple[str, ...] = ()
    backfilled: bool = False
    change: Change | None = field(default=None, compare=False)

    @property
    def facts(self) -> dict[str, object]:
        """The fields that the store and JSON have."""
        names = (name for name in self.__slots__ if name != "change")
        return {name: getattr(self, name) for name in names} | {"metric": self.metric.key}

    @property
    def subject(self) -> str:
        """Id of the container, device and workload; see `Series`."""
        return self.series.removesuffix(f"-{self.metric.key}")

    @property
    def scope(self) -> str:
        """The devices in words."""
        return scope_of(self.devices)

    @property
    def size(self) -> float:
        """Size of the change, for comparison with others: of the logarithm of its ratio."""
        return abs(math.log(self.ratio))

    @property
    def loss(self) -> str:
        """The change in words: `-5.2%`."""
        return percent(self.ratio - 1)


def assess(series: Iterable[Series], known: Iterable[Alert]) -> tuple[Alert, ...]:
    """Find the alerts of histories as they are now: those that are known, and new ones.

    The facts of an alert (size, night, commits) are those of its history as long as that shows its
    loss, and stay as they are from then on. Nothing is written: a report says with it what `review`
    would.
    """
    alerts = {alert.id: alert for alert in known}
    of_series = by_series(alerts.values())
    for one in series:
        alerts |= {alert.id: alert for alert in _assess_one(one, of_series.get(one.id, ()))}
    return tuple(sorted(alerts.values(), key=lambda alert: (-alert.began_at.timestamp(), alert.id)))


def assess_store(store: ResultsStore, metrics: Sequence[str]) -> tuple[Alert, ...]:
    """Find the alerts of a store as `review` would leave those of some metrics; writes nothing."""
    return assess(read_series(store, SeriesFilter(metrics)), list_alerts(store))


def review(
    store: ResultsStore, series: Iterable[Series], judged_until: datetime | None = None
) -> tuple[Alert, ...]:
    """Make alerts of losses that have none, mark recoveries, and return the new ones.

    Several processes may do so at once; a loss gets one alert.

    Args:
        judged_until: the newest run that was judged before.
    """
    table = schema.alerts
    judged = {one.id: one for one in series}

    def write(connection: Connection) -> tuple[Alert, ...]:
        new = []
        rows = connection.execute(select(table)).mappings()
        alerts = {row["id"]: _alert(row) for row in rows if row["series"] in judged}
        for alert in assess(judged.values(), alerts.values()):
            is_late = judged_until is not None and alert.found_at < judged_until - _NIGHT_APART
            if alert.id not in alerts and is_late:
                note = "; ".join(filter(None, (alert.note, "in older results")))
                alert = replace(alert, backfilled=True, note=note)  # noqa: PLW2901
            row = alert.facts
            if alert.id not in alerts:
                # Another process may make the same alert at the same time.
                with suppress(IntegrityError), connection.begin_nested():
                    connection.execute(insert(table).values(row | {"created_at": alert.changed_at}))
                    new.append(alert)
            elif alert != alerts[alert.id]:
                connection.execute(update(table).where(table.c.id == alert.id).values(row))
        return tuple(new)

    return store.database.insist(write) or ()


def review_new(store: ResultsStore) -> tuple[Alert, ...]:
    """Review the histories in which anything is new since they were reviewed last."""
    table, runs = schema.reviews, schema.runs.c
    ended = select(func.max(runs.created_at)).where(runs.status != "running")
    with store.database.reading() as connection:
        rows = connection.execute(select(table)).all()
        newest = connection.scalar(ended)
    marked, whole = {row.subject: row.judged for row in rows}, mark_store(store)
    if marked.get(_ALL) == whole:
        return ()
    judged_until = max((row.until for row in rows if row.until), default=None)
    until = min(newest, now()) if newest else None  # clocks of hosts may be wrong
    placed = PlacedRuns.of(store.heads())
    marks = mark_subjects(placed)
    news = [subject for subject, mark in marks.items() if marked.get(subject) != mark]
    marks[_ALL] = whole
    new = tuple(
        alert
        for some in iterate_series(store, subjects=news, placed=placed)
        for alert in review(store, some, judged_until)
    )

    def write(connection: Connection) -> None:
        with suppress(IntegrityError):  # another process reviewed them meanwhile: its marks stay
            connection.execute(delete(table))
            for subject, mark in marks.items():
                connection.execute(insert(table).values(subject=subject, judged=mark, until=until))

    store.database.insist(write)
    return new


def by_series(alerts: Iterable[Alert]) -> Mapping[str, Sequence[Alert]]:
    """Sort alerts by the id of their series."""
    found = defaultdict[str, list[Alert]](list)
    for alert in alerts:
        found[alert.series].append(alert)
    return found


def _match(series: Series, known: Iterable[Alert]) -> dict[Change, Alert]:
    """Find the known alert that each loss of a series has, at most one of each.

    That is the alert which the loss was named by. Where more of the history is known, a loss may
    have another place and name: then it is the nearest one that is left.
    """
    losses = [change for change in (*series.changes, *series.refuted) if change.is_loss]
    unmatched = {alert.id: alert for alert in known}
    matches = {
        change: unmatched.pop(name)
        for change in losses
        if (name := _name(series, change)) in unmatched
    }
    nights = [night.at for night in series.nights]
    pairs = sorted(
        (abs(bisect_left(nights, alert.began_at) - change.night), number, alert.id)
        for alert in unmatched.values()
        if alert.began_at >= nights[0]
        for number, change in enumerate(losses)  # refuted ones are last
        if change.devices == alert.devices
    )
    for apart, number, alert_id in pairs:
        if apart <= _SAME_NIGHTS and alert_id in unmatched and losses[number] not in matches:
            matches[losses[number]] = unmatched.pop(alert_id)
    return matches


def list_alerts(store: ResultsStore, states: Collection[AlertState] = STATES) -> tuple[Alert, ...]:
    """List the alerts in these states, newest loss first."""
    table = schema.alerts
    query = select(table).where(table.c.state.in_(states))
    with store.database.reading() as connection, refuse_unreadable_rows(store.location):
        rows = connection.execute(query.order_by(table.c.began_at.desc(), table.c.id))
        return tuple(_alert(row) for row in rows.mappings())


def list_untold(store: ResultsStore) -> tuple[Alert, ...]:
    """List the open alerts of which nobody was told."""
    states: tuple[AlertState, ...] = ("open",)
    return tuple(alert for alert in list_alerts(store, states) if alert.told_at is None)


def mark_told(store: ResultsStore, ids: Collection[str]) -> None:
    """Record that somebody was told of alerts, so that nobody is told of them again."""
    table = schema.alerts
    untold = table.c.id.in_(ids) & table.c.told_at.is_(None)
    mark = update(table).where(untold).values(told_at=now())
    store.database.insist(lambda connection: connection.execute(mark))


def set_state(
    store: ResultsStore, ids: Sequence[str], state: AlertState, *, note: str = ""
) -> tuple[Alert, ...]:
    """Change the state of alerts, all or none.

    Args:
        ids: each may be shortened, as long as one alert has that beginning.
        note: replaces the one before, if there is one.

    Raises:
        NotStoredError: an id is that of no alert, or of several.
    """
    table = schema.alerts
    values: dict[str, object] = {"state": state, "changed_at": now()}
    if note:
        values["note"] = to_storable(note)

    def write(connection: Connection) -> list[str]:
        all_ids = connection.scalars(select(table.c.id)).all()
        settled_ids = [_find(store.location, prefix, all_ids) for prefix in ids]
        connection.execute(update(table).where(table.c.id.in_(settled_ids)).values(values))
        return settled_ids

    settled_ids = store.database.insist(write) or ()
    return tuple(alert for alert in list_alerts(store) if alert.id in settled_ids)


def group_alerts(alerts: Iterable[Alert]) -> tuple[tuple[Alert, ...], ...]:
    """Group alerts that probably have one cause, the greatest loss of each group first.

    A slower container shows in several metrics of one subject, whose places may be a night apart,
    and on the same night in one metric of several subjects.
    """
    groups: list[list[Alert]] = []
    for alert in sorted(alerts, key=lambda one: (one.began_at, one.id)):
        same_cause = [group for group in groups if any(_of_one_cause(alert, one) for one in group)]
        groups = [group for group in groups if group not in same_cause]
        groups.append([alert, *(one for group in same_cause for one in group)])
    by_size = (sorted(group, key=lambda one: (-one.size, one.id)) for group in groups)
    return tuple(tuple(group) for group in sorted(by_size, key=lambda group: group[0].began_at))


def is_news(alert: Alert, group: Iterable[Alert]) -> bool:
    """Return whether somebody has to be told of an alert, given those of its cause.

    An alert that somebody was told of explains later alerts of its cause, but for another loss of
    the same series and for a far greater one of the same metric: sizes of different metrics do not
    compare.
    """
    explanations = (one for one in group if one.told_at is not None)
    return alert.told_at is None and not any(
        one.series != alert.series
        and _of_one_cause(alert, one)
        and (one.metric != alert.metric or alert.size <= _FAR_GREATER * one.size)
        for one in explanations
    )


def _of_one_cause(a: Alert, b: Alert) -> bool:
    apart = abs(a.began_at - b.began_at)
    if a.subject == b.subject:
        return apart <= _NIGHT_APART
    commits = {a.bad_commit, b.bad_commit}
    return a.metric == b.metric and len(commits) == 1 and apart < PAUSE


def _find(location: str, wanted: str, known: Sequence[str]) -> str:
    matches = [alert_id for alert_id in known if wanted and alert_id.startswith(wanted.lower())]
    if len(matches) != 1:
        reason = f"{len(matches)} have ids that begin so" if matches else "none has that id"
        listing = "`qnnfarm alerts ls --all` lists them"
        raise NotStoredError(location, f"alert {wanted!r}: {reason}; {listing}")
    return matches[0]


def _assess_one(series: Series, known: Sequence[Alert]) -> Iterator[Alert]:
    """Yield the alerts of a series, with their facts and states as they are now."""
    alert_of = _match(series, known)
    changes = {alert.id: change for change, alert in alert_of.items()}
    for alert in known:
        yield _settle(series, _renew(series, alert, changes.get(alert.id)))
    for change in series.changes:
        if change.is_loss and change not in alert_of:
            yield _settle(series, _make_alert(series, change))


def _renew(series: Series, alert: Alert, change: Change | None) -> Alert:
    if change is None or change.refuted is not None:
        return replace(alert, change=change)
    return replace(
        _make_alert(series, change), id=alert.id, state=alert.state, note=alert.note,
        changed_at=alert.changed_at, told_at=alert.told_at, backfilled=alert.backfilled,
    )  # fmt: skip


def _settle(series: Series, alert: Alert) -> Alert:
    """Mark an alert as fixed where its series has recovered or refuted the loss.

    It is open again where the series has refuted that recovery.
    """
    change = alert.change
    if alert.state == "fixed" and alert.note.startswith(_RECOVERED):
        return _open_again(series, alert)
    if alert.state not in UNSETTLED:
        return alert
    if change is not None and change.refuted is not None:
        day = f"{series.nights[change.refuted].at:%Y-%m-%d}"
        note = f"refuted: back at the old level by itself, {day}"
    elif (recovery := _recovery(series, alert)) is not None:
        note = _recovered(recovery)
    else:
        return alert
    return replace(alert, state="fixed", note=note, changed_at=now())


def _open_again(series: Series, alert: Alert) -> Alert:
    change = alert.change
    stands = change is not None and change.refuted is None and _recovery(series, alert) is None
    for one in series.refuted if stands else ():
        if series.nights[one.night].at > alert.began_at and not one.is_loss and one.refuted:
            note = f"its recovery was refuted, {series.nights[one.refuted].at:%Y-%m-%d}"
            return replace(alert, state="open", note=note, changed_at=now())
    return alert


def _recovery(series: Series, alert: Alert) -> MeasuredNight | None:
    """Return the night on which later changes had taken back half of a loss."""
    loss = gained = -math.log(alert.ratio)
    phones = {serial for night in series.nights for serial in night.devices}
    for later in series.changes:
        if series.nights[later.night].at > alert.began_at and later.concerns(alert.devices):
            part = 1.0 if alert.devices or not later.devices else len(later.devices) / len(phones)
            gained -= part * math.log(later.ratio)
            if gained / loss <= 1 - _RECOVERY:
                return series.nights[later.night]
    return None


def _recovered(night: MeasuredNight) -> str:
    commit = f" at {night.commit[:12]}" if night.commit else ""
    return f"{_RECOVERED}{night.at:%Y-%m-%d}{commit}"


def _name(series: Series, change: Change) -> str:
    """Name a loss by the first session at the new level, in any process."""
    first = series.first_night(change).sessions[0].head.id
    return hashlib.sha256(f"{first} {series.id}{change.scope}".encode()).hexdigest()[:10]


def _make_alert(series: Series, change: Change) -> Alert:
    good, bad = series.commits(change)
    return Alert(
        id=_name(series, change),
        series=series.id,
        metric=series.metric,
        name=f"{change.scope}: {series.name}" if change.scope else series.name,
        state="open",
        began_at=series.nights[change.night].at,
        found_at=series.nights[change.found].at,
        ratio=change.ratio,
        good_commit=good,
        bad_commit=bad,
        note="; ".join(series.differences_of_devices(change)),
        changed_at=now(),
        told_at=None,
        devices=change.devices,
        change=change,
    )


def _alert(row: RowMapping) -> Alert:
    fields = {name: row[name] for name in Alert.__slots__ if name != "change"}
    devices = tuple(row["devices"])
    return Alert(**fields | {"metric": find_metric(row["metric"]), "devices": devices})
