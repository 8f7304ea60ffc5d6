"""Reservations: times for which a device is leased to the processes of one user alone."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, Row, select

from harness.pool.records import Reservation, shown
from harness.pool.schema import reservations


def upcoming(db: Connection, now: float, keys: Collection[str]) -> list[Reservation]:
    """Return the reservations of devices that have not ended, by their start."""
    of_keys = reservations.c.end > now, reservations.c.key.in_(tuple(keys))
    query = select(reservations).where(*of_keys).order_by(reservations.c.start, reservations.c.id)
    return [_reservation_of(row) for row in db.execute(query)]


def current(db: Connection, now: float) -> Mapping[str, Reservation]:
    """Return the reservations of this moment, by the keys of their devices."""
    is_now = reservations.c.start <= now, reservations.c.end > now
    rows = db.execute(select(reservations).where(*is_now).order_by(reservations.c.id.desc()))
    return {row.key: _reservation_of(row) for row in rows}


def add(
    db: Connection, keys: Collection[str], user: str, start: float, end: float, now: float
) -> list[Reservation]:
    """Reserve devices, unless somebody else has one for a part of that time.

    Returns:
        The reservations that are in the way, of which none is this user's; empty if none was.
    """
    obstacles = [
        other
        for other in upcoming(db, now, keys)
        if other.user != user and other.start < end and start < other.end
    ]
    if not obstacles:
        db.execute(reservations.delete().where(reservations.c.end <= now))
        for key in keys:
            values = {"key": key, "user": user, "start": start, "end": end}
            same = [reservations.c[name] == value for name, value in values.items()]
            if db.scalar(select(reservations.c.id).where(*same)) is None:
                db.execute(reservations.insert().values(values))
    return obstacles


def cancel(db: Connection, number: int, now: float) -> Reservation | None:
    """Remove a reservation and return it; `None` if there is none of that number."""
    live = reservations.c.id == number, reservations.c.end > now
    row = db.execute(reservations.delete().where(*live).returning(reservations)).one_or_none()
    return None if row is None else _reservation_of(row)


def move(db: Connection, before: str, key: str) -> None:
    """Let the reservations of a device follow when it gets another key."""
    db.execute(reservations.update().where(reservations.c.key == before).values(key=key))


def _reservation_of(row: Row[Any]) -> Reservation:
    return Reservation(row.id, row.key, shown(row.user), row.start, row.end)
