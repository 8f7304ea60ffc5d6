"""Members of a pool: as configured, and as recorded in the ledger."""

import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.devices.spec import DeviceSpec
from harness.errors import ConfigFileError, RequirementError, UnknownMemberError, WrongUseError
from harness.pool.config import DeviceEntry, PoolConfig, default_name
from harness.pool.ledger import Ledger
from harness.pool.records import DeviceRow
from harness.pool.requirement import MemberStatus, Requirement, candidates
from harness.pool.states import MemberState


@dataclass(frozen=True, slots=True)
class Member:
    """A configured device of a pool, whether it is there or not.

    Attributes:
        name: unique in the pool.
        soc: SoC with which a virtual device is made.
        power_cycle: its own command, in place of the pool's.
    """

    name: str
    spec: DeviceSpec
    tags: frozenset[str] = field(default_factory=frozenset)
    soc: str | None = None
    power_cycle: tuple[str, ...] | None = None


Discover = Callable[[DeviceEntry], Sequence[DeviceSpec]]


def configured_members(config: PoolConfig, discover: Discover, where: str) -> list[Member]:
    """Return the devices of a configuration, in its order; discovery skips those it names."""
    specs = {entry.spec for entry in config.devices}
    names = {entry.name or default_name(entry.spec) for entry in config.devices if entry.spec}
    members: list[Member] = []
    for number, entry in enumerate(config.devices):
        for spec in discover(entry) if entry.spec is None else [entry.spec]:
            name = entry.name or default_name(spec)
            if entry.spec is None:
                if spec in specs or {spec.identifier, spec.serial} & set(entry.exclude):
                    continue
                if name in names:
                    reason = (
                        f"it finds {spec}, and another device is named {name}: give that another"
                    )
                    raise ConfigFileError(where, None, f"devices[{number}]", reason)
                specs.add(spec)
                names.add(name)
            members.append(Member(name, spec, entry.tags, entry.soc, entry.power_cycle))
    return members


def members_of_specs(specs: Iterable[DeviceSpec]) -> list[Member]:
    """Return just these devices, of which none may be given twice."""
    members: list[Member] = []
    for spec in specs:
        if any(member.spec == spec for member in members):
            raise WrongUseError(f"the device {spec} is given twice")
        members.append(Member(default_name(spec), spec))
    return members


class Members:
    """The members of a pool and their devices in the ledger; safe for several threads.

    Addresses and facts of devices change seldom. So the members that meet a requirement are
    remembered until the ledger's `facts_version` changes, which is read each time.

    Attributes:
        by_name: all of them, in the order of the configuration.
    """

    def __init__(self, ledger: Ledger, members: Sequence[Member]) -> None:
        self._ledger = ledger
        self.by_name: Mapping[str, Member] = {member.name: member for member in members}
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()
        self._version = -1
        self._matches: dict[Requirement, Mapping[str, Member]] = {}

    def by_key(self) -> dict[str, Member]:
        """Return the members with a device in the ledger, by its key."""
        return {key: self.by_name[name] for name, key in self._current_keys().items()}

    def member(self, name: str) -> Member:
        """Return the member of that name; `UnknownMemberError` if there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownMemberError(name, tuple(self.by_name)) from None

    def key_of(self, name: str) -> str | None:
        """Return the key of a member's device, if the ledger has it."""
        return self._current_keys().get(name)

    def set_key(self, name: str, key: str) -> None:
        """Store the key of a member's device."""
        with self._lock:
            self._keys[name] = key

    def rows(self) -> dict[str, DeviceRow]:
        """Return the ledger's devices of the members, by name."""
        keys = self._current_keys()
        rows = self._ledger.rows(set(keys.values()))
        return {name: rows[keys[name]] for name in self.by_name if keys.get(name) in rows}

    def statuses(self, limit: float = 0.0) -> list[MemberStatus]:
        """Return the status of all members; those that were never probed are absent.

        Args:
            limit: weight of failures that brings quarantine.
        """
        rows, now = self.rows(), time.time()
        state, reason = MemberState.ABSENT, "`qnnfarm pool probe` looks"
        return [
            status_of(member, rows[name], limit)
            if name in rows
            else MemberStatus(name, member.spec, member.tags, state, reason, now, seen=NOT_PROBED)
            for name, member in self.by_name.items()
        ]

    def matching(self, requirement: Requirement) -> Mapping[str, Member]:
        """Return the members that meet a requirement, by the keys of their devices, best first."""
        self._current_keys()
        with self._lock:
            version, matches = self._version, self._matches.get(requirement)
        if matches is not None:
            return matches
        keys = self._current_keys()
        fits = candidates(requirement, [s for s in self.statuses() if s.name in keys])
        matches = {keys[status.name]: self.by_name[status.name] for status in fits}
        if len(matches) < requirement.count:
            reason = "some of its names stand for one and the same device"
            raise RequirementError(str(requirement), reason)
        with self._lock:
            if version == self._version:
                self._matches[requirement] = matches
        return matches

    def _current_keys(self) -> dict[str, str]:
        """Return the key of each member's device, which changes when the device is replaced."""
        version = self._ledger.facts_version()
        with self._lock:
            if version == self._version:
                return dict(self._keys)
        names = {str(member.spec): name for name, member in self.by_name.items()}
        keys = self._ledger.keys_of(names)
        with self._lock:
            self._keys |= {names[spec]: key for spec, key in keys.items()}
            if version > self._version:
                self._version = version
                self._matches = {}
            return dict(self._keys)


NOT_PROBED = "not looked at yet"


def status_of(member: Member, row: DeviceRow, limit: float = 0.0) -> MemberStatus:
    """Return the status of a device that the ledger has; `limit` as in `MemberStatus`."""
    return MemberStatus(
        name=member.name,
        spec=member.spec,
        tags=member.tags,
        state=row.state,
        reason=row.reason,
        since=row.since,
        holder=row.lease.holder if row.lease else "",
        token=row.lease.token if row.lease else None,
        soc=row.facts.soc,
        hexagon=row.facts.hexagon,
        free_bytes=row.facts.free_bytes,
        failures=tuple(failure.text for failure in row.failures),
        weight=sum(failure.weight for failure in row.failures),
        limit=limit,
        seen="" if row.probed or row.state is not MemberState.ABSENT else NOT_PROBED,
        reservations=row.reservations,
    )


def describe_idle_recovery(name: str, row: DeviceRow) -> str:
    """Describe a recovery that no process works on, with advice; empty if it is not so."""
    if row.state is not MemberState.RECOVERING or row.lease is not None:
        return ""
    step = f" ({row.step} was begun)" if row.step else ""
    recover = f"`qnnfarm pool recover {shlex.quote(name)}`"
    return f"no process is recovering it{step}: the next one that waits for it will, or {recover}"
