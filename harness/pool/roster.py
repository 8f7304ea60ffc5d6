"""Which devices of the ledger the members of a pool are, and which of them would do."""

import threading
import time
from collections.abc import Mapping, Sequence

from harness.errors import RequirementError, UnknownMemberError
from harness.pool.base import MemberStatus, Requirement
from harness.pool.matching import candidates
from harness.pool.members import Member
from harness.pool.register import Register
from harness.pool.rows import DeviceRow
from harness.pool.status import not_looked_at, status_of


class Roster:
    """The members of a pool, as the ledger knows them. For several threads.

    What a device is changes seldom, what it does all the time. So the members that meet a
    requirement are found once, and again only when the ledger says that addresses or facts
    of devices have changed; it is asked each time.
    """

    def __init__(self, register: Register, members: Sequence[Member]) -> None:
        self._register = register
        self._members = {member.name: member for member in members}
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()
        self._version = -1
        self._found: dict[Requirement, Mapping[str, Member]] = {}

    @property
    def members(self) -> Mapping[str, Member]:
        """All, by name, in the order of the configuration."""
        return self._members

    def by_key(self) -> dict[str, Member]:
        """Those that are known, by the keys of the ledger."""
        return {key: self._members[name] for name, key in self._known_keys().items()}

    def member(self, name: str) -> Member:
        """One by its name.

        Raises:
            UnknownMemberError: there is none.
        """
        try:
            return self._members[name]
        except KeyError:
            raise UnknownMemberError(name, tuple(self._members)) from None

    def known(self, name: str) -> str | None:
        """The device that a member is, if anybody has looked at it."""
        return self._known_keys().get(name)

    def learn(self, name: str, key: str) -> None:
        """A member was reached, or is known to be absent."""
        with self._lock:
            self._keys[name] = key

    def rows(self) -> dict[str, DeviceRow]:
        """The devices of the members, by name, as they are now."""
        keys = self._known_keys()
        rows = self._register.rows(set(keys.values()))
        return {name: rows[keys[name]] for name in self._members if keys.get(name) in rows}

    def statuses(self, limit: float = 0.0) -> list[MemberStatus]:
        """All members, as others see them; those that nobody has looked at are absent.

        Args:
            limit: of what may count against a device.
        """
        rows, now = self.rows(), time.time()
        return [
            status_of(member, rows[name], limit) if name in rows else not_looked_at(member, now)
            for name, member in self._members.items()
        ]

    def meeting(self, requirement: Requirement) -> Mapping[str, Member]:
        """The members that would do, by the keys of their devices, best first.

        Raises:
            RequirementError: no device could ever do.
        """
        self._known_keys()
        with self._lock:
            version, found = self._version, self._found.get(requirement)
        if found is not None:
            return found
        keys = self._known_keys()
        fits = candidates(requirement, [s for s in self.statuses() if s.name in keys])
        found = {keys[status.name]: self._members[status.name] for status in fits}
        if len(found) < requirement.count:
            reason = "some of its names stand for one and the same device"
            raise RequirementError(str(requirement), reason)
        with self._lock:
            if version == self._version:
                self._found[requirement] = found
        return found

    def _known_keys(self) -> dict[str, str]:
        """Which device is behind each name; another than before where it was replaced."""
        version = self._register.facts_version()
        with self._lock:
            if version == self._version:
                return dict(self._keys)
        names = {str(member.spec): name for name, member in self._members.items()}
        keys = self._register.keys_of(names)
        with self._lock:
            self._keys |= {names[spec]: key for spec, key in keys.items()}
            if version > self._version:
                self._version = version
                self._found = {}
            return dict(self._keys)
