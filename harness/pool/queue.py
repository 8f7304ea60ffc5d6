"""Who is served next: first come first served, without starvation.

Tickets are matched to free devices in the order in which they came. A ticket that cannot be
served whole keeps the devices it got (they wait for it until the rest are free), so a later ticket
gets only what no earlier one can use. Which of its devices a ticket gets is chosen so that as
many tickets as possible are served: an earlier one that can do with another device makes
room, but never loses one (augmenting paths of a bipartite matching).
"""

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
            if not _augment(claim, free, taken, set()):
                break
        waiting.append(claim)
    for claim in waiting:
        got = [key for key in claim.candidates if taken.get(key) is claim]
        if len(got) == claim.count:
            served[claim.ticket] = got
    return served


def _augment(
    claim: Claim, free: AbstractSet[str], taken: dict[str, Claim], tried: set[str]
) -> bool:
    """Give `claim` one device more, moving others to devices that serve them as well."""
    usable = [key for key in claim.candidates if key in free and key not in tried]
    for key in usable:
        if key not in taken:
            taken[key] = claim
            return True
    for key in usable:
        holder = taken[key]
        if holder is claim or key in tried:
            continue
        tried.add(key)
        if _augment(holder, free, taken, tried):
            taken[key] = claim
            return True
    return False
