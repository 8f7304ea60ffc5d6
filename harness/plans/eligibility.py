"""Which devices of the pool may run a cell."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.errors import RequirementError
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
