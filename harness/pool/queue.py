"""Who is served next: first come first served, without starvation.

Tickets are matched to free devices in the order in which they came. A ticket that cannot be
served whole keeps the devices it got (they wait for it until the rest are free), so a later ticket
gets only what no earlier one can use. Which of its devices a ticket gets is chosen so that as
many tickets as possible are served: an earlier one that can do with another device makes
room, but never loses one (augmenting paths of a bipartite matching).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What a ticket asks for.

    Attributes:
        candidates: keys of the devices that would do, best first.
        count: how many of them, all or none.
    """

    ticket: int
    candidates: tuple[str, ...]
    count: int


def serve(
    claims: Iterable[Claim], free: AbstractSet[str], in_use: AbstractSet[str]
) -> Mapping[int, Sequence[str]]:
    """The tickets that can be served now, and with which devices.

    Args:
        claims: by age, oldest first.
        free: devices that can be granted.
        in_use: devices that will be free again. What is in neither (absent, quarantined) may
            stay so for long: a ticket that cannot do without it keeps its place, but no devices.
    """
    taken: dict[str, Claim] = {}
    served: dict[int, Sequence[str]] = {}
    waiting: list[Claim] = []
    there = free | in_use
    for claim in claims:
        if len(taken) == len(free):
            break
        if sum(key in there for key in claim.candidates) < claim.count:
            continue
        for _ in range(claim.count):
            if not _augment(claim, free, taken):
                break
        waiting.append(claim)
    for claim in waiting:
        got = [key for key in claim.candidates if taken.get(key) is claim]
        if len(got) == claim.count:
            served[claim.ticket] = got
    return served


def _augment(claim: Claim, free: AbstractSet[str], taken: dict[str, Claim]) -> bool:
    """Give `claim` one device more, moving others to devices that serve them as well."""
    wanted_by: dict[str, tuple[Claim, str | None]] = {}
    """By device: the claim that would take it, and what that claim would give up for it."""
    looking: deque[tuple[Claim, str | None]] = deque([(claim, None)])
    while looking:
        taker, given_up = looking.popleft()
        for key in taker.candidates:
            if key not in free or key in wanted_by:
                continue
            wanted_by[key] = taker, given_up
            if key in taken:
                looking.append((taken[key], key))
                continue
            moved: str | None = key
            while moved is not None:
                taken[moved], moved = wanted_by[moved]
            return True
    return False
