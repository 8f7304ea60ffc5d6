"""Alerts: losses in histories, each told once and kept until somebody or a recovery settles it.

`assess` finds an open alert for every loss that has none yet; `review` also keeps them in the
store. An alert belongs to one loss of one series: however often the history is judged, the loss
stays the same alert, whatever its state. When the series recovers at least half of the loss, its
alert is fixed; so it is when later nights refute the loss.
"""

import hashlib
import importlib.metadata
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, get_args

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from harness.errors import UnknownAlertError
from harness.results import schema
from harness.results.database import refuse_unreadable_rows
from harness.results.history import Night, Series, read_series
from harness.results.metrics import Metric, find_metric
from harness.results.nights import PAUSE
from harness.results.records import now, to_storable
from harness.results.statistics.changes import Change
from harness.results.store import ResultsStore

AlertState = Literal["open", "acknowledged", "fixed", "expected"]
STATES: tuple[AlertState, ...] = get_args(AlertState)
UNSETTLED: frozenset[AlertState] = frozenset({"open", "acknowledged"})
_SAME_NIGHTS = 3
"""Nights by which the place of a loss may move when more of the history is known."""
_NIGHT_APART = timedelta(hours=36)
_FAR_GREATER = 1.5
_RECOVERY = 0.5
"""Part of a loss whose recovery makes it fixed."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A loss and what became of it.

    Attributes:
        id: short, to be typed.
        series: id of the series.
        name: of the series, in words, when the loss was found.
        began_at: the first night at the new level.
        found_at: the night on which it was told apart from noise.
        ratio: new level over old one.
        good_commit, bad_commit: the last commit before, and the first one with the loss.
        note: in words, why it has its state.
        told_at: when somebody was told; None until then.
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

    @property
    def subject(self) -> str:
        """Id of the container, device and workload; see `Series`."""
        return self.series.removesuffix(f"-{self.metric.key}")

    @property
    def size(self) -> float:
        """Size of the change, for comparison with others: of the logarithm of its ratio."""
        return abs(math.log(self.ratio))

    @property
    def loss(self) -> str:
        """The change in words: `-5.2 %`."""
        return f"{self.ratio - 1:+.1%}"


def assess(series: Iterable[Series], known: Iterable[Alert]) -> tuple[Alert, ...]:
    """Find the alerts of histories as they are now: those that are known, and new ones.

    Nothing is written: a report says with it what `review` would.
    """
    found = {alert.id: alert for alert in known}
    for one in series:
        mine = [alert for alert in found.values() if alert.series == one.id]
        for number, change in enumerate(one.changes):
            if not change.is_loss:
                continue
            recovery = _recovery(one, number)
            alert = find_alert(one, change, mine) or _new_alert(one, change)
            if recovery and alert.state in UNSETTLED:
                note = _recovered(recovery)
                alert = replace(alert, state="fixed", note=note, changed_at=now())
            found[alert.id] = alert
        for change in one.refuted:
            refuted = find_alert(one, change, mine) if change.is_loss else None
            if refuted is not None and refuted.state in UNSETTLED:
                note = _refuted(one, change)
                found[refuted.id] = replace(refuted, state="fixed", note=note, changed_at=now())
    return tuple(sorted(found.values(), key=lambda alert: (-alert.began_at.timestamp(), alert.id)))


def review(store: ResultsStore, series: Iterable[Series]) -> tuple[Alert, ...]:
    """Make alerts of losses that have none, mark what has recovered, and return the new ones.

    Several processes may do so at once; a loss gets one alert.
    """
    made: list[str] = []
    for one in series:
        if not one.changes and not one.refuted:
            continue
        try:
            with store.database.writing() as connection:
                made += _review_one(connection, one)
        except IntegrityError:
            continue  # another process has just made the same alert
    return tuple(alert for alert in list_alerts(store) if alert.id in set(made))


def review_new(store: ResultsStore) -> tuple[Alert, ...]:
    """Review all histories, unless nothing was measured since they were reviewed last."""
    runs, table = schema.runs.c, schema.reviews
    newest = select(func.count(), func.max(runs.created_at), func.max(runs.finished_at))
    with store.database.reading() as connection:
        counted = connection.execute(newest.where(runs.status == "done")).one()
        seen = connection.scalar(select(table.c.runs))
    current = " ".join(map(str, (importlib.metadata.version("qnnfarm"), *counted)))
    if seen == current:
        return ()
    made = review(store, read_series(store))
    with store.database.writing() as connection:
        connection.execute(delete(table))
        connection.execute(insert(table).values(runs=current))
    return made


def find_alert(series: Series, change: Change, alerts: Iterable[Alert]) -> Alert | None:
    """Find the alert that a loss of a series has."""
    first, last = change.night - _SAME_NIGHTS, change.night + _SAME_NIGHTS
    nights = series.nights[max(first, 0) : last + 1]
    mine = (alert for alert in alerts if alert.series == series.id)
    return next((one for one in mine if nights[0].at <= one.began_at <= nights[-1].at), None)


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
    with store.database.writing() as connection:
        connection.execute(update(table).where(untold).values(told_at=now()))


def set_state(
    store: ResultsStore, ids: Sequence[str], state: AlertState, *, note: str = ""
) -> tuple[Alert, ...]:
    """Change the state of alerts, all or none.

    Args:
        ids: each may be shortened, as long as one alert has that beginning.
        note: replaces the one before, if there is one.

    Raises:
        UnknownAlertError: an id is that of no alert, or of several.
    """
    table = schema.alerts
    values: dict[str, object] = {"state": state, "changed_at": now()}
    if note:
        values["note"] = to_storable(note)
    with store.database.writing() as connection:
        known = connection.scalars(select(table.c.id)).all()
        chosen = [_find(store.location, wanted, known) for wanted in ids]
        connection.execute(update(table).where(table.c.id.in_(chosen)).values(values))
    return tuple(alert for alert in list_alerts(store) if alert.id in chosen)


def group_alerts(alerts: Iterable[Alert]) -> tuple[tuple[Alert, ...], ...]:
    """Group alerts that probably have one cause, the greatest loss of each group first.

    A slower container shows in several metrics of one subject, whose places may be a night apart,
    and on the same night in one metric of several subjects.
    """
    groups: list[list[Alert]] = []
    for alert in sorted(alerts, key=lambda one: (one.began_at, one.id)):
        joined = [group for group in groups if any(_of_one_cause(alert, one) for one in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([alert, *(one for group in joined for one in group)])
    ordered = (sorted(group, key=lambda one: (-one.size, one.id)) for group in groups)
    return tuple(tuple(group) for group in sorted(ordered, key=lambda group: group[0].began_at))


def is_news(alert: Alert, group: Iterable[Alert]) -> bool:
    """Return whether somebody has to be told of an alert, given those of its cause.

    What was told of explains later alerts of its cause, but for another loss of the same series and
    for a far greater one of the same metric: sizes of different metrics do not compare.
    """
    told = (one for one in group if one.told_at is not None)
    return alert.told_at is None and not any(
        one.series != alert.series
        and _of_one_cause(alert, one)
        and (one.metric != alert.metric or alert.size <= _FAR_GREATER * one.size)
        for one in told
    )


def _of_one_cause(a: Alert, b: Alert) -> bool:
    apart = abs(a.began_at - b.began_at)
    if a.subject == b.subject:
        return apart <= _NIGHT_APART
    commits = {a.bad_commit, b.bad_commit}
    return a.metric == b.metric and len(commits) == 1 and apart < PAUSE


def _find(location: str, wanted: str, known: Sequence[str]) -> str:
    found = [alert_id for alert_id in known if wanted and alert_id.startswith(wanted.lower())]
    if len(found) != 1:
        reason = f"{len(found)} have ids that begin so" if found else "none has that id"
        raise UnknownAlertError(location, wanted, reason)
    return found[0]


def _review_one(connection: Connection, series: Series) -> list[str]:
    table = schema.alerts
    rows = connection.execute(select(table).where(table.c.series == series.id)).mappings()
    known = {row["id"]: _alert(row) for row in rows}
    made = []
    for alert in assess([series], known.values()):
        if alert.id not in known:
            row = {name: getattr(alert, name) for name in alert.__slots__}
            row |= {"metric": alert.metric.key, "created_at": alert.changed_at}
            connection.execute(insert(table).values(row))
            made.append(alert.id)
        elif alert != known[alert.id]:
            settled = {"state": alert.state, "note": alert.note, "changed_at": alert.changed_at}
            connection.execute(update(table).where(table.c.id == alert.id).values(settled))
    return made


def _recovery(series: Series, number: int) -> Night | None:
    """Return the night on which later changes had taken back half of a loss."""
    loss = gained = -math.log(series.changes[number].ratio)
    for later in series.changes[number + 1 :]:
        gained -= math.log(later.ratio)
        if gained / loss <= 1 - _RECOVERY:
            return series.nights[later.night]
    return None


def _recovered(night: Night) -> str:
    commit = f" at {night.commit[:12]}" if night.commit else ""
    return f"recovered on {night.at:%Y-%m-%d}{commit}"


def _refuted(series: Series, change: Change) -> str:
    at = f", {series.nights[change.refuted].at:%Y-%m-%d}" if change.refuted is not None else ""
    return f"refuted: back at the old level by itself{at}"


def _new_alert(series: Series, change: Change) -> Alert:
    good, bad = series.commits(change)
    began = series.nights[change.night]
    # The first session at the new level names the loss, whoever finds it.
    named = hashlib.sha256(f"{began.sessions[0].run.id} {series.id}".encode()).hexdigest()
    return Alert(
        id=named[:10],
        series=series.id,
        metric=series.metric,
        name=series.name,
        state="open",
        began_at=began.at,
        found_at=series.nights[change.found].at,
        ratio=change.ratio,
        good_commit=good,
        bad_commit=bad,
        note="",
        changed_at=now(),
        told_at=None,
    )


def _alert(row: RowMapping) -> Alert:
    return Alert(
        id=row["id"],
        series=row["series"],
        metric=find_metric(row["metric"]),
        name=row["name"],
        state=row["state"],
        began_at=row["began_at"],
        found_at=row["found_at"],
        ratio=row["ratio"],
        good_commit=row["good_commit"],
        bad_commit=row["bad_commit"],
        note=row["note"],
        changed_at=row["changed_at"],
        told_at=row["told_at"],
    )
