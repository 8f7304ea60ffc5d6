"""History of devices: the newest events one by one, older ones counted by day, then by month.

So it never ends, and yet stays small. Days and months are those of UTC.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from harness.pool.records import shown

_EVENTS = 500
_BATCH = 50
"""So many events are counted at once, so that not every new event has to do it."""
_DAYS_S = 92 * 86_400.0
_LONGEST_TEXT = 1000
_DAY, _MONTH = "%Y-%m-%d", "%Y-%m"


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event of a device, or the number of its events in a day or month.

    Attributes:
        at: seconds since 1970; the beginning of a day or month.
        what: kind of event; `day` or `month` for a total.
        period: the day or month of a total, e.g. `2026-11`; empty for an event.
        counts: number of events by kind, in a total.
    """

    at: float
    what: str
    text: str
    period: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


def add_event(
    db: sqlite3.Connection, key: str, at: float, what: str, text: str, token: int | None = None
) -> None:
    """Add an event of a device; the oldest events are counted once there are many.

    Args:
        token: of the lease that was lost, if one was.
    """
    db.execute(
        "INSERT INTO history (key, at, what, text, token) VALUES (?, ?, ?, ?, ?)",
        (key, at, what, text[:_LONGEST_TEXT], token),
    )
    if _is_behind(db, key, _EVENTS + _BATCH):
        _count_old_events(db, key)
        _count_old_days(db, key, datetime.fromtimestamp(at - _DAYS_S, UTC).strftime(_DAY))


def read_history(db: sqlite3.Connection, key: str, since: float) -> list[HistoryEntry]:
    """Return the totals and events of a device, oldest first.

    Args:
        since: leaves out what ended before, in seconds since 1970.
    """
    totals: dict[str, dict[str, int]] = {}
    for row in db.execute(
        "SELECT period, what, count FROM totals WHERE key = ? ORDER BY period, what", (key,)
    ):
        totals.setdefault(row["period"], {})[shown(row["what"])] = row["count"]
    first = datetime.fromtimestamp(max(since, 0.0), UTC).strftime(_DAY)
    entries = []
    for period, counts in totals.items():
        if period >= first[: len(period)]:
            with suppress(ValueError):  # any user of a shared ledger may have written it
                entries.append(_total(period, counts))
    rows = db.execute(
        "SELECT at, what, text, token FROM history WHERE key = ? AND at >= ? ORDER BY id",
        (key, since),
    )
    entries += [
        HistoryEntry(at, shown(what), shown(text if token is None else f"token {token}: {text}"))
        for at, what, text, token in rows
    ]
    return entries


def _total(period: str, counts: Mapping[str, int]) -> HistoryEntry:
    what, form = ("day", _DAY) if len(period) == len("2026-01-01") else ("month", _MONTH)
    at = datetime.strptime(period, form).replace(tzinfo=UTC).timestamp()
    text = ", ".join(f"{name} {count}" for name, count in counts.items())
    return HistoryEntry(at, what, text, period, counts)


def _is_behind(db: sqlite3.Connection, key: str, count: int) -> bool:
    """Return whether a device has more than `count` events."""
    row = db.execute(
        "SELECT 1 FROM history WHERE key = ? ORDER BY id DESC LIMIT 1 OFFSET ?", (key, count)
    ).fetchone()
    return row is not None


def _count_old_events(db: sqlite3.Connection, key: str) -> None:
    (newest,) = db.execute(
        "SELECT id FROM history WHERE key = ? ORDER BY id DESC LIMIT 1 OFFSET ?", (key, _EVENTS)
    ).fetchone()
    db.execute(
        "INSERT INTO totals SELECT key, strftime('%Y-%m-%d', at, 'unixepoch'), what, count(*)"
        " FROM history WHERE key = ? AND id <= ? GROUP BY 1, 2, 3"
        " ON CONFLICT DO UPDATE SET count = count + excluded.count",
        (key, newest),
    )
    db.execute("DELETE FROM history WHERE key = ? AND id <= ?", (key, newest))


def _count_old_days(db: sqlite3.Connection, key: str, first: str) -> None:
    """Count the days before `first` by month."""
    old = "key = ? AND length(period) = 10 AND period < ?"
    db.execute(
        "INSERT INTO totals SELECT key, substr(period, 1, 7), what, sum(count)"  # noqa: S608
        f" FROM totals WHERE {old} GROUP BY 1, 2, 3"
        " ON CONFLICT DO UPDATE SET count = count + excluded.count",
        (key, first),
    )
    db.execute(f"DELETE FROM totals WHERE {old}", (key, first))  # noqa: S608
