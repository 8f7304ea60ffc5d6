"""Lease requests: which devices to ask the pool for, and which of them may run a cell."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from harness.errors import HarnessError, NoDeviceForCellError, RequirementError
from harness.plans.cell_queue import CellQueue
from harness.plans.cells import Cell
from harness.pool.requirement import Requirement, candidates
from harness.pool.states import MemberState
from harness.pool.status import MemberStatus

_OUT_OF_USE = {MemberState.ABSENT, MemberState.DRAINING, MemberState.QUARANTINED}


def meets(requirement: Requirement, member: MemberStatus) -> bool:
    """Whether a device is of the kind that is asked for, by what the pool knows of it.

    Free space is left to the pool: it changes, and is asked of the device when it is leased.
    """
    return (
        requirement.name in {None, member.name}
        and requirement.type in {None, member.spec.type}
        and requirement.soc in {None, member.soc}
        and requirement.hexagon in {None, member.hexagon}
        and requirement.tags <= member.tags
    )


class Members:
    """The devices of the pool as they were at one moment."""

    def __init__(self, members: Iterable[MemberStatus]) -> None:
        self._by_name = {member.name: member for member in members}
        self._meeting: dict[Requirement, Sequence[str]] = {}

    def meeting(self, requirement: Requirement) -> Sequence[str]:
        """Names of the devices of that kind."""
        found = self._meeting.get(requirement)
        if found is None:
            found = [name for name, m in self._by_name.items() if meets(requirement, m)]
            self._meeting[requirement] = found
        return found

    def would_do(self, requirement: Requirement) -> Sequence[MemberStatus]:
        """Those that would do once they are free or back, as far as anybody knows."""
        try:
            return candidates(replace(requirement, count=1), list(self._by_name.values()))
        except RequirementError:
            return ()

    def usable(self, names: Iterable[str]) -> list[str]:
        """Those that can be had now or soon, the ready ones first."""
        usable = [n for n in names if self._by_name[n].state not in _OUT_OF_USE]
        return sorted(usable, key=lambda n: self._by_name[n].state is not MemberState.READY)

    def ready(self, names: Iterable[str]) -> list[str]:
        """Those that nobody holds."""
        return [n for n in names if self._by_name[n].state is MemberState.READY]

    def fits(self, name: str, leased_as: Requirement, wanted: Requirement) -> bool:
        """Whether a device that was leased for one requirement will do for another."""
        if wanted == replace(leased_as, name=wanted.name):
            return wanted.name in {None, name}
        member = self._by_name.get(name)
        if member is None or not meets(wanted, member):
            return False
        return wanted.min_free_bytes <= leased_as.min_free_bytes


class Placement:
    """Where cells failed, and where their replicas are. Not for several threads."""

    def __init__(self) -> None:
        self._failed_on: dict[str, set[str]] = {}
        self._replicas_on: dict[str, set[str]] = {}

    def allows(self, cell: Cell, member: str) -> bool:
        """Whether the device may run the cell."""
        return member not in self._failed_on.get(cell.key, ()) and not self._has_replica(
            cell, member
        )

    def is_bound(self, cell: Cell) -> bool:
        """Whether not every device that meets the cell's requirement will do."""
        return bool(cell.spread) or bool(self._failed_on.get(cell.key))

    def given(self, cell: Cell, member: str) -> None:
        """The device runs the cell."""
        if cell.spread:
            self._replicas_on.setdefault(cell.spread, set()).add(member)

    def failed(self, cell: Cell, member: str) -> None:
        """The cell failed there: it is better tried elsewhere."""
        self._failed_on.setdefault(cell.key, set()).add(member)
        if cell.spread:
            self._replicas_on[cell.spread].discard(member)

    def refused(self, cell: Cell, member: str) -> None:
        """The device would never do for the cell, by what the pool knows of it."""
        self._failed_on.setdefault(cell.key, set()).add(member)

    def relax(self, cell: Cell, members: Collection[str]) -> None:
        """Where a cell failed on all devices that there are, it may go onto them again."""
        if members and not any(self.allows(cell, member) for member in members):
            self._failed_on.pop(cell.key, None)

    def is_exhausted(self, cell: Cell, members: Collection[str]) -> bool:
        """Whether each of the devices has another replica of the cell."""
        return bool(members) and all(self._has_replica(cell, member) for member in members)

    def _has_replica(self, cell: Cell, member: str) -> bool:
        return bool(cell.spread) and member in self._replicas_on.get(cell.spread, ())


_MOST_ASKING = 16
"""100 devices of one host are leased as fast by 16 at once as by 32, and slower by 4."""


def serves(asked: Requirement, wanted: Requirement) -> bool:
    """Whether a request, by name or not, is made for what requires `wanted`."""
    return asked == wanted or (wanted.name is None and asked == replace(wanted, name=asked.name))


class Asking:
    """The requests that are on their way. Not for several threads: its owner has a lock.

    Args:
        fail: told of cells that can get no device, which wait no longer then.
        max_parallel: at most so many devices at once; `None` for no limit.
        lease_s: for how long cells wait while no device at all is free for them.
    """

    def __init__(
        self,
        queue: CellQueue,
        placement: Placement,
        fail: Callable[[Sequence[Cell], HarnessError], None],
        *,
        max_parallel: int | None,
        lease_s: float,
    ) -> None:
        self._queue = queue
        self._placement = placement
        self._fail = fail
        self._max_parallel = max_parallel
        self._lease_s = lease_s
        self._asked: Counter[Requirement] = Counter()
        self._without_device: dict[Requirement, float] = {}
        self._limited: set[Requirement] = set()
        self._crowded = False

    def requests(self, members: Members, held: Collection[str]) -> Iterator[Requirement]:
        """What to ask for now; each counts as asked for until it is `answered`.

        First what is there to be had, then what has to be waited for.

        Args:
            held: names of the devices that are leased.
        """
        self._limited.clear()
        self._crowded = False
        waiting = self._queue.requirements()
        for at_once in (True, False):
            for requirement, count in waiting:
                names = members.meeting(requirement)
                free = [name for name in members.usable(names) if name not in held]
                if at_once:
                    free = members.ready(free)
                least = 0 if at_once or any(name in held for name in names) else 1
                for wish in self._wishes(requirement, count, names, free, members, least):
                    if not self._may_ask(len(held)):
                        self._limited.add(requirement)
                        self._crowded = self._crowded or at_once
                        break
                    self._asked[wish] += 1
                    yield wish

    def answered(self, requirement: Requirement) -> None:
        """A request came to its end, whichever."""
        self._asked[requirement] -= 1

    def refused(self, asked: Requirement, error: RequirementError) -> None:
        """No device could ever do: cells fail, or go elsewhere if it was asked for by name."""
        self._fail(list(self._queue.waiting(asked)), error)
        for requirement, _ in self._queue.requirements():
            if asked.name is not None and serves(asked, requirement):
                for cell in filter(self._placement.is_bound, self._queue.waiting(requirement)):
                    self._placement.refused(cell, asked.name)

    def gives_way(self, asked: Requirement, members: Members, held: Collection[str]) -> bool:
        """Whether a request that has to wait takes the place of one that could be served now."""
        return self._crowded and not any(
            name not in held for name in members.ready(members.meeting(asked))
        )

    def give_up(self, members: Members, held: Collection[str]) -> None:
        """Cells for which no device at all could be had for too long have failed."""
        at = time.monotonic()
        starving = self.starving(members, held)
        for other in self._without_device.keys() - set(starving):
            del self._without_device[other]  # what waits again later begins to wait then
        for requirement in starving:
            since = self._without_device.setdefault(requirement, at)
            if at - since >= self._lease_s:
                error = NoDeviceForCellError(str(requirement), self._lease_s)
                self._fail(list(self._queue.waiting(requirement)), error)

    def starving(self, members: Members, held: Collection[str]) -> Sequence[Requirement]:
        """What cells wait for while no device serves them, though one is asked for."""
        return [
            requirement
            for requirement, _ in self._queue.requirements()
            if requirement not in self._limited
            and not any(name in held for name in members.meeting(requirement))
        ]

    def _wishes(
        self,
        requirement: Requirement,
        count: int,
        names: Sequence[str],
        free: Sequence[str],
        members: Members,
        least: int,
    ) -> Iterator[Requirement]:
        bound = all(map(self._placement.is_bound, self._queue.waiting(requirement)))
        if bound and names:
            yield from self._by_name(requirement, names, free, members.usable(names))
            return
        while self._asked[requirement] < min(count, max(len(free), least)):
            yield requirement

    def _by_name(
        self,
        requirement: Requirement,
        names: Sequence[str],
        free: Sequence[str],
        usable: Sequence[str],
    ) -> Iterator[Requirement]:
        """For cells that may not go onto just any device: again, or spread over devices."""
        for cell in list(self._queue.waiting(requirement)):
            if self._placement.is_exhausted(cell, names):
                reason = f"all {len(names)} have another replica of the cell: lower its `count`"
                self._fail([cell], RequirementError(str(requirement), reason))
                continue
            self._placement.relax(cell, usable)
            for name in free:
                named = replace(requirement, name=name)
                if self._placement.allows(cell, name) and not self._asked[named]:
                    yield named
                    break

    def _may_ask(self, held: int) -> bool:
        most, asking = self._max_parallel, self._asked.total()
        return asking < _MOST_ASKING and (most is None or asking + held < most)
