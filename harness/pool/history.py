"""History of devices: the newest events of each kind.

So leases, which are many, push out neither failures nor repairs.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select

from harness.pool.records import shown
from harness.pool.schema import history

_EVENTS = 500
"""Of a kind, by device."""
_BATCH = 50
"""Old events go at each event of the ledger with such a number, not at every one."""
_LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event of a device.

    Attributes:
        at: seconds since 1970.
        what: its kind.
    """

    at: float
    what: str
    text: str


def add_event(
    db: Connection,
    key: str,
    at: float,
    what: str,
    text: str,
    token: int | None = None,
    grant: str = "",
) -> None:
    """Add an event of a device; the oldest of a kind go once there are many.

    Args:
        token, grant: of the lease that was lost, if one was.
    """
    text = text[:_LONGEST_TEXT].replace("\0", " ")
    event = history.insert().values(key=key, at=at, what=what, text=text, token=token, nonce=grant)
    number = db.execute(event.returning(history.c.id)).scalar_one()
    if number % _BATCH == 0:
        place = func.row_number().over(partition_by=history.c.what, order_by=history.c.id.desc())
        events = select(history.c.id, place.label("place")).where(history.c.key == key).subquery()
        old = select(events.c.id).where(events.c.place > _EVENTS)
        db.execute(delete(history).where(history.c.id.in_(old)))


def read_history(db: Connection, key: str, since: float) -> list[HistoryEntry]:
    """Return the events of a device, oldest first.

    Args:
        since: seconds since 1970; events before are left out.
    """
    events = select(history).where(history.c.key == key, history.c.at >= since)
    entries = []
    for row in db.execute(events.order_by(history.c.id)):
        text = row.text if row.token is None else f"token {row.token}: {row.text}"
        entries.append(HistoryEntry(row.at, shown(row.what), shown(text)))
    return entries
