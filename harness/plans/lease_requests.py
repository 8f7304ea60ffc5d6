"""Lease requests: which devices to ask the pool for, and which of them may run a cell."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from harness.errors import HarnessError, LeaseTimeoutError, RequirementError
from harness.plans.cells import Cell
from harness.plans.protocols import Queue
from harness.pool.requirement import MemberStatus, Requirement, candidates
from harness.pool.states import MemberState

_OUT_OF_USE = {MemberState.ABSENT, MemberState.DRAINING, MemberState.QUARANTINED}
_MOST_PENDING = 16
"""100 devices of one host are leased as fast by 16 requests at once as by 32, slower by 4."""


def meets(requirement: Requirement, member: MemberStatus) -> bool:
    """Return whether a device is of the required kind, as far as the pool's records tell.

    Free space is left to the pool: it changes, and is measured when the device is leased.
    """
    return (
        requirement.name in {None, member.name}
        and requirement.type in {None, member.spec.type}
        and requirement.soc in {None, member.soc}
        and requirement.hexagon in {None, member.hexagon}
        and requirement.tags <= member.tags
    )


def serves(request: Requirement, requirement: Requirement) -> bool:
    """Return whether a request, by name or not, is made for cells of a requirement."""
    return request == requirement or (
        requirement.name is None and request == replace(requirement, name=request.name)
    )


class PoolSnapshot:
    """Snapshot of the pool's devices."""

    def __init__(self, members: Iterable[MemberStatus]) -> None:
        self._by_name = {member.name: member for member in members}
        self._matching: dict[Requirement, Sequence[str]] = {}

    def matching(self, requirement: Requirement) -> Sequence[str]:
        """Return the names of the devices of the required kind."""
        names = self._matching.get(requirement)
        if names is None:
            names = [name for name, member in self._by_name.items() if meets(requirement, member)]
            self._matching[requirement] = names
        return names

    def candidates(self, requirement: Requirement) -> Sequence[MemberStatus]:
        """Return the devices that would do once they are free or back."""
        try:
            return candidates(replace(requirement, count=1), list(self._by_name.values()))
        except RequirementError:
            return ()

    def usable(self, names: Iterable[str]) -> list[str]:
        """Return devices that can be leased now or soon, the ready ones first."""
        usable = [n for n in names if self._by_name[n].state not in _OUT_OF_USE]
        return sorted(usable, key=lambda n: self._by_name[n].state is not MemberState.READY)

    def ready(self, names: Iterable[str]) -> list[str]:
        """Return devices that are free."""
        return [n for n in names if self._by_name[n].state is MemberState.READY]

    def fits(self, name: str, leased_as: Requirement, requirement: Requirement) -> bool:
        """Return whether a device leased for one requirement will do for another."""
        if requirement == replace(leased_as, name=requirement.name):
            return requirement.name in {None, name}
        member = self._by_name.get(name)
        if member is None or not meets(requirement, member):
            return False
        return requirement.min_free_bytes <= leased_as.min_free_bytes


class PlacementRules:
    """Devices that a cell must avoid: where it failed, and where its replicas run.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._excluded: dict[str, set[str]] = {}
        self._replicas_on: dict[str, set[str]] = {}

    def allows(self, cell: Cell, member: str) -> bool:
        """Return whether the device may run the cell."""
        return member not in self._excluded.get(cell.key, ()) and not self._has_replica(
            cell, member
        )

    def is_restricted(self, cell: Cell) -> bool:
        """Return whether the cell may not go onto just any device of its kind."""
        return bool(cell.anti_affinity) or bool(self._excluded.get(cell.key))

    def assign(self, cell: Cell, member: str) -> None:
        """Record that the device runs the cell."""
        if cell.anti_affinity:
            self._replicas_on.setdefault(cell.anti_affinity, set()).add(member)

    def unassign(self, cell: Cell, member: str) -> None:
        """Record that the device runs the cell no longer."""
        if cell.anti_affinity:
            self._replicas_on[cell.anti_affinity].discard(member)

    def exclude(self, cell: Cell, member: str) -> None:
        """Keep the cell away from the device."""
        self._excluded.setdefault(cell.key, set()).add(member)

    def relax(self, cell: Cell, members: Collection[str]) -> None:
        """Forget where a cell failed, once it failed on all of these devices."""
        if members and not any(self.allows(cell, member) for member in members):
            self._excluded.pop(cell.key, None)

    def is_exhausted(self, cell: Cell, members: Collection[str]) -> bool:
        """Return whether each of the devices runs another replica of the cell."""
        return bool(members) and all(self._has_replica(cell, member) for member in members)

    def _has_replica(self, cell: Cell, member: str) -> bool:
        replicas_on = self._replicas_on.get(cell.anti_affinity, ())
        return bool(cell.anti_affinity) and member in replicas_on


class LeaseRequests:
    """The pending requests to the pool. Not thread-safe: its owner has a lock.

    Args:
        fail: called with cells that can get no device; it takes them out of the queue.
        max_parallel: most devices at once; `None` for no limit.
        lease_s: how long cells wait while no device at all is free for them.
    """

    def __init__(
        self,
        queue: Queue,
        placement: PlacementRules,
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
        self._pending: Counter[Requirement] = Counter()
        self._starving_since: dict[Requirement, float] = {}
        self._limited: set[Requirement] = set()
        self._is_crowded = False

    def open(self, members: PoolSnapshot, leased: Collection[str]) -> Iterator[Requirement]:
        """Yield the requests of this moment; each is pending until it is closed.

        Devices that are free come first, then those that have to be waited for.

        Args:
            leased: names of the devices that this run holds.
        """
        self._limited.clear()
        self._is_crowded = False
        requirements = self._queue.requirements()
        for at_once in (True, False):
            for requirement, count in requirements:
                names = members.matching(requirement)
                free = [name for name in members.usable(names) if name not in leased]
                if at_once:
                    free = members.ready(free)
                least = 0 if at_once or any(name in leased for name in names) else 1
                for request in self._requests(requirement, count, names, free, members, least):
                    if not self._is_below_limit(len(leased)):
                        self._limited.add(requirement)
                        self._is_crowded = self._is_crowded or at_once
                        break
                    self._pending[request] += 1
                    yield request

    def close(self, request: Requirement) -> None:
        """Count a request as no longer pending."""
        self._pending[request] -= 1

    def reject(self, request: Requirement, error: RequirementError) -> None:
        """Handle a request that no device can meet.

        Its cells fail, or go elsewhere if it was made by name.
        """
        self._fail(list(self._queue.waiting(request)), error)
        for requirement, _ in self._queue.requirements():
            if request.name is not None and serves(request, requirement):
                for cell in filter(self._placement.is_restricted, self._queue.waiting(requirement)):
                    self._placement.exclude(cell, request.name)

    def should_yield(
        self, request: Requirement, members: PoolSnapshot, leased: Collection[str]
    ) -> bool:
        """Return whether a request that must wait blocks one that could be served now."""
        return self._is_crowded and not any(
            name not in leased for name in members.ready(members.matching(request))
        )

    def fail_starved(self, members: PoolSnapshot, leased: Collection[str]) -> None:
        """Fail the cells that have waited too long without any device."""
        at = time.monotonic()
        starving = self.starving(members, leased)
        for other in self._starving_since.keys() - set(starving):
            del self._starving_since[other]
        for requirement in starving:
            since = self._starving_since.setdefault(requirement, at)
            if at - since >= self._lease_s:
                reason = "`qnnfarm pool` shows who holds them, and what is wrong with them"
                error = LeaseTimeoutError(
                    str(requirement), self._lease_s, f"no device was free; {reason}"
                )
                self._fail(list(self._queue.waiting(requirement)), error)

    def starving(self, members: PoolSnapshot, leased: Collection[str]) -> Sequence[Requirement]:
        """Return requirements of waiting cells that no leased device serves, though requested."""
        return [
            requirement
            for requirement, _ in self._queue.requirements()
            if requirement not in self._limited
            and not any(name in leased for name in members.matching(requirement))
        ]

    def _requests(
        self,
        requirement: Requirement,
        count: int,
        names: Sequence[str],
        free: Sequence[str],
        members: PoolSnapshot,
        least: int,
    ) -> Iterator[Requirement]:
        if names and all(map(self._placement.is_restricted, self._queue.waiting(requirement))):
            yield from self._requests_by_name(requirement, names, free, members.usable(names))
            return
        while self._pending[requirement] < min(count, max(len(free), least)):
            yield requirement

    def _requests_by_name(
        self,
        requirement: Requirement,
        names: Sequence[str],
        free: Sequence[str],
        usable: Sequence[str],
    ) -> Iterator[Requirement]:
        """Yield requests for cells that are tried again elsewhere, or spread over devices."""
        for cell in list(self._queue.waiting(requirement)):
            if self._placement.is_exhausted(cell, names):
                reason = f"all {len(names)} run another replica of the cell: lower its `count`"
                self._fail([cell], RequirementError(str(requirement), reason))
                continue
            self._placement.relax(cell, usable)
            for name in free:
                request = replace(requirement, name=name)
                if self._placement.allows(cell, name) and not self._pending[request]:
                    yield request
                    break

    def _is_below_limit(self, leased: int) -> bool:
        most, number = self._max_parallel, self._pending.total()
        return number < _MOST_PENDING and (most is None or number + leased < most)
