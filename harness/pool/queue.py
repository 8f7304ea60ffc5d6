"""Queue discipline: first come, first served, without starvation.

Tickets are matched to free devices in the order in which they came. A ticket that cannot be
served whole keeps the devices it got (they wait for it until the rest are free), so a later ticket
gets only devices that no earlier one can use. As many tickets as possible are served: an earlier
one that can do with another device makes room, but never loses one (augmenting paths of a bipartite
matching).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


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
