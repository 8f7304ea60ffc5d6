"""Queue of requests: first come, first served, without starvation; and reservations.

Tickets are matched to free devices in the order in which they came. A ticket that cannot be
served whole keeps the devices it got (they wait for it until the rest are free), so a later ticket
gets only devices that no earlier one can use. As many tickets as possible are served: an earlier
one that can do with another device makes room, but never loses one (augmenting paths of a bipartite
matching). A reserved device is leased to the processes of one user alone.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from harness.pool.records import Reservation, reservations, shown


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a ticket.

    Attributes:
        candidates: keys of the devices that meet it, best first.
        count: number of devices, all or none.
    """

    ticket: int
    candidates: tuple[str, ...]
    count: int


def keep(
    requests: Iterable[Request], free: AbstractSet[str], in_use: AbstractSet[str]
) -> Mapping[str, Request]:
    """Return the free devices that requests get now, or keep until the rest of theirs are free.

    Args:
        requests: by age, oldest first.
        free: devices that can be granted.
        in_use: devices that will be free again. A device in neither (absent, quarantined) may
            stay so for long: a ticket that needs it keeps its place, but no devices.
    """
    holders: dict[str, Request] = {}
    present = free | in_use
    for request in requests:
        if len(holders) == len(free):
            break
        if sum(key in present for key in request.candidates) < request.count:
            continue
        for _ in range(request.count):
            if not _augment(request, free, holders):
                break
    return holders


def served(holders: Mapping[str, Request]) -> Mapping[int, Sequence[str]]:
    """Return the tickets that have all of their devices among those that requests keep."""
    tickets: dict[int, Sequence[str]] = {}
    for request in set(holders.values()):
        keys = [key for key in request.candidates if holders.get(key) is request]
        if len(keys) == request.count:
            tickets[request.ticket] = keys
    return tickets


def _augment(request: Request, free: AbstractSet[str], holders: dict[str, Request]) -> bool:
    """Give `request` one more device, moving others to devices that serve them as well."""
    wanted_by: dict[str, tuple[Request, str | None]] = {}
    """By device: the request that would take it, and the device that it would give up."""
    frontier: deque[tuple[Request, str | None]] = deque([(request, None)])
    while frontier:
        taker, given_up = frontier.popleft()
        for key in taker.candidates:
            if key not in free or key in wanted_by:
                continue
            wanted_by[key] = taker, given_up
            if key in holders:
                frontier.append((holders[key], key))
                continue
            place: str | None = key
            while place is not None:
                holders[place], place = wanted_by[place]
            return True
    return False


def upcoming_reservations(db: Connection, now: float, keys: Collection[str]) -> list[Reservation]:
    """Return the reservations of devices that have not ended, by their start."""
    of_keys = reservations.c.end > now, reservations.c.key.in_(tuple(keys))
    query = select(reservations).where(*of_keys).order_by(reservations.c.start, reservations.c.id)
    return [_reservation_of(row) for row in db.execute(query)]


def current_reservations(db: Connection, now: float) -> Mapping[str, Reservation]:
    """Return the reservations of this moment, by the keys of their devices."""
    is_now = reservations.c.start <= now, reservations.c.end > now
    rows = db.execute(select(reservations).where(*is_now).order_by(reservations.c.id.desc()))
    return {row.key: _reservation_of(row) for row in rows}


def add_reservations(
    db: Connection, keys: Collection[str], user: str, start: float, end: float, now: float
) -> list[Reservation]:
    """Reserve devices, unless somebody else has one for a part of that time.

    Returns:
        The reservations that are in the way, of which none is this user's; empty if none was.
    """
    obstacles = [
        other
        for other in upcoming_reservations(db, now, keys)
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


def cancel_reservation(db: Connection, number: int, now: float) -> Reservation | None:
    """Remove a reservation and return it; `None` if there is none of that number."""
    live = reservations.c.id == number, reservations.c.end > now
    row = db.execute(reservations.delete().where(*live).returning(reservations)).one_or_none()
    return None if row is None else _reservation_of(row)


def move_reservations(db: Connection, before: str, key: str) -> None:
    """Let the reservations of a device follow when it gets another key."""
    db.execute(reservations.update().where(reservations.c.key == before).values(key=key))


def _reservation_of(row: Row[Any]) -> Reservation:
    return Reservation(row.id, row.key, shown(row.user), row.start, row.end)
