"""History of devices: the newest events one by one, older ones counted by day, then by month.

So it never ends, and yet stays small. Days and months are those of UTC.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import Connection, delete, func, select

from harness.pool.records import shown
from harness.pool.schema import history, totals

_EVENTS = 500
_BATCH = 50
"""Old events are counted at each event of the ledger with such a number, not at every one."""
_DAYS_S = 92 * 86_400.0
_LONGEST_TEXT = 1000
_DAY, _MONTH = "%Y-%m-%d", "%Y-%m"


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event of a device, or the number of its events in a day or month.

    Attributes:
        at: seconds since 1970; the beginning of a day or month.
        what: kind of the event; `day` or `month` for a total.
        period: the day or month of a total, e.g. `2026-11`; empty for an event.
        counts: number of events by kind, in a total.
    """

    at: float
    what: str
    text: str
    period: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


def add_event(
    db: Connection,
    key: str,
    at: float,
    what: str,
    text: str,
    token: int | None = None,
    grant: str = "",
) -> None:
    """Add an event of a device; the oldest events are counted once there are many.

    Args:
        token, grant: of the lease that was lost, if one was.
    """
    text = text[:_LONGEST_TEXT].replace("\0", " ")
    event = history.insert().values(key=key, at=at, what=what, text=text, token=token, nonce=grant)
    number = db.execute(event.returning(history.c.id)).scalar_one()
    if number % _BATCH == 0 and _nth_newest(db, key, _EVENTS) is not None:
        _count_old_events(db, key)
        _count_old_days(db, key, datetime.fromtimestamp(at - _DAYS_S, UTC).strftime(_DAY))


def read_history(db: Connection, key: str, since: float) -> list[HistoryEntry]:
    """Return the totals and events of a device, oldest first.

    Args:
        since: seconds since 1970; events before are left out.
    """
    counts: dict[str, dict[str, int]] = {}
    columns = totals.c
    for row in db.execute(
        select(columns.period, columns.what, columns.number)
        .where(columns.key == key)
        .order_by(columns.period, columns.what)
    ):
        counts.setdefault(row.period, {})[shown(row.what)] = row.number
    first = datetime.fromtimestamp(max(since, 0.0), UTC).strftime(_DAY)
    entries = []
    for period, of_period in counts.items():
        if period >= first[: len(period)]:
            with suppress(ValueError):  # any user of a shared ledger may have written it
                entries.append(_total(period, of_period))
    events = select(history).where(history.c.key == key, history.c.at >= since)
    for row in db.execute(events.order_by(history.c.id)):
        text = row.text if row.token is None else f"token {row.token}: {row.text}"
        entries.append(HistoryEntry(row.at, shown(row.what), shown(text)))
    return entries


def _total(period: str, counts: Mapping[str, int]) -> HistoryEntry:
    what, form = ("day", _DAY) if len(period) == len("2026-01-01") else ("month", _MONTH)
    at = datetime.strptime(period, form).replace(tzinfo=UTC).timestamp()
    text = ", ".join(f"{name} {count}" for name, count in counts.items())
    return HistoryEntry(at, what, text, period, counts)


def _nth_newest(db: Connection, key: str, number: int) -> int | None:
    ids = select(history.c.id).where(history.c.key == key).order_by(history.c.id.desc())
    return db.scalar(ids.offset(number).limit(1))


def _count_old_events(db: Connection, key: str) -> None:
    old = history.c.key == key, history.c.id <= _nth_newest(db, key, _EVENTS)
    counts = Counter(
        (datetime.fromtimestamp(row.at, UTC).strftime(_DAY), row.what)
        for row in db.execute(select(history.c.at, history.c.what).where(*old))
    )
    _add_totals(db, key, counts)
    db.execute(delete(history).where(*old))


def _count_old_days(db: Connection, key: str, first: str) -> None:
    """Count the days before `first` by month."""
    columns = totals.c
    old = columns.key == key, func.length(columns.period) == len(first), columns.period < first
    counts: Counter[tuple[str, str]] = Counter()
    for row in db.execute(select(columns.period, columns.what, columns.number).where(*old)):
        counts[row.period[: len("2026-01")], row.what] += row.number
    db.execute(delete(totals).where(*old))
    _add_totals(db, key, counts)


def _add_totals(db: Connection, key: str, counts: Mapping[tuple[str, str], int]) -> None:
    columns = totals.c
    for (period, what), number in counts.items():
        of_period = columns.key == key, columns.period == period, columns.what == what
        more = totals.update().where(*of_period).values(number=columns.number + number)
        if not db.execute(more).rowcount:
            db.execute(totals.insert().values(key=key, period=period, what=what, number=number))
