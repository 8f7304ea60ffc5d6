"""Requirements of a lease, the status of a pool's members, and why a request waits for them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.clock import format_time
from harness.devices.spec import DeviceSpec
from harness.errors import RequirementError, one_line
from harness.pool.records import Reservation
from harness.pool.states import MemberState

OnProgress = Callable[[str], None]
"""Called with a sentence for each step of a long operation, and for its result."""


def ignore_progress(_: str) -> None:
    """Drop a progress message."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Status of one device of a pool.

    Attributes:
        name: its unique name in the pool.
        reason: why it is in this state, for people.
        since: seconds since 1970 at which it came into this state.
        holder: holder of its lease, for people; empty if there is none.
        token: fencing token of that lease.
        failures: the heaviest failure of each lease that counts against it, newest last.
        weight: sum of their weights; `limit` brings quarantine.
        seen: why `state` may be wrong, without asking the device: it was never probed, or its
            virtual device does not run; empty if nothing is known.
        reservations: those that have not ended, by their start.
    """

    name: str
    spec: DeviceSpec
    tags: frozenset[str]
    state: MemberState
    reason: str
    since: float
    holder: str = ""
    token: int | None = None
    soc: str = ""
    hexagon: str = ""
    free_bytes: int | None = None
    failures: tuple[str, ...] = ()
    weight: float = 0.0
    limit: float = 0.0
    seen: str = ""
    reservations: tuple[Reservation, ...] = ()

    @property
    def reserved(self) -> str:
        """Its reservation now, for people; empty if there is none."""
        now = time.time()
        return next((r.describe(now) for r in self.reservations if r.start <= now < r.end), "")

    @property
    def is_unsure(self) -> bool:
        """True if something seen now contradicts the ledger's state."""
        return bool(self.seen) and self.state in {MemberState.READY, MemberState.ABSENT}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for devices.

    Attributes:
        holder: for people.
        since: seconds since 1970.
        candidates: keys of the devices that would do.
        reason: the holders of these, or why they are out; the ledger alone does not say it.
    """

    holder: str
    since: float
    candidates: tuple[str, ...]
    reason: str = ""


_MAX_MEMBERS = 6
_AWAY = {MemberState.ABSENT, MemberState.RECOVERING}
_UNTRUSTED = {MemberState.QUARANTINED, MemberState.PROBATION}

_ABSENT = "absent"
_LOOKED_FOR = "looked for"

WaitReasons = frozenset[tuple[str, str]]
"""Names of devices, each with the kind of its reason."""


def describe_wait(members: Sequence[MemberStatus], *, own: str = "") -> str:
    """Describe the holder of each device, or why it is out, and since when.

    Args:
        own: the holder that waits: its own devices are being claimed.
    """
    reasons = [_reason(member, own) for member in members[:_MAX_MEMBERS]]
    if len(members) > _MAX_MEMBERS:
        reasons.append(f"and {len(members) - _MAX_MEMBERS} more")
    return "; ".join(reasons) or "the pool has no such device now"


def wait_reasons(
    members: Sequence[MemberStatus], reported: WaitReasons = frozenset()
) -> WaitReasons:
    """Return the kinds of reasons, which change only when the reason changes for a person.

    A device that is looked for again and again changes between absent and recovering: once it was
    reported as absent, it is so while somebody looks. Reported as recovering, why it is absent is
    news.
    """
    kinds = {(member.name, _kind(member)) for member in members}
    return frozenset(
        (name, _ABSENT) if kind == _LOOKED_FOR and (name, _ABSENT) in reported else (name, kind)
        for name, kind in kinds
    )


def _kind(member: MemberStatus) -> str:
    if member.state is MemberState.ABSENT:
        return _ABSENT
    if member.state is MemberState.RECOVERING:
        return _LOOKED_FOR
    if member.state in _UNTRUSTED:
        return "distrusted"
    if member.reserved and not member.holder:
        return member.reserved
    return f"held by {member.holder}" if member.holder else f"{member.state}: {member.reason}"


def _reason(member: MemberStatus, own: str) -> str:
    name, since = one_line(member.name, 80), format_time(member.since, time.time())
    repaired = member.state in _AWAY | _UNTRUSTED
    if own and member.holder == own:
        return f"{name} is being claimed since {since}"
    if member.holder and not repaired:
        return f"{name} is held by {one_line(member.holder)} since {since}"
    if member.reserved:
        return f"{name} is {member.reserved}"
    if member.state is MemberState.READY:
        return f"{name} is ready, but not granted yet"
    reason = f" ({one_line(member.reason, 120)})" if member.reason else ""
    return f"{name} is {member.state}{reason} since {since}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """Requirement that the devices of a lease must meet; `None` and empty fields mean any.

    Attributes:
        soc: e.g. `SM8750`.
        hexagon: Hexagon architecture, e.g. `v79`.
        name: name of one member of the pool.
        tags: the device must have all of them.
        min_free_bytes: free space under the work root of the device.
        count: number of devices, all or none.
    """

    soc: str | None = None
    hexagon: str | None = None
    type: str | None = None
    name: str | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    min_free_bytes: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("at least one device")

    def __str__(self) -> str:
        facts = [(key, getattr(self, key)) for key in ("soc", "hexagon", "type", "name")]
        words = [f"{key}={value}" for key, value in facts if value is not None]
        words += [f"tag={tag}" for tag in sorted(self.tags)]
        if self.min_free_bytes:
            words.append(f"free>={self.min_free_bytes}")
        if self.count > 1:
            words.append(f"count={self.count}")
        return " ".join(words) or "any device"


def candidates(requirement: Requirement, members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Return the members that meet a requirement, now or once they are free or back.

    Members with the fewest tags come first, so that a request for any device leaves the special
    ones to others.

    Raises:
        RequirementError: fewer than `requirement.count` could ever meet it; names the part at
            fault.
    """
    fits = list(members)
    for part, meets, describe in _parts(requirement):
        others, fits = fits, [member for member in fits if meets(member)]
        if len(fits) < requirement.count:
            raise RequirementError(
                str(requirement), _why(part, requirement, others, fits, describe)
            )
    return sorted(fits, key=lambda member: len(member.tags))


_Describe = Callable[[MemberStatus], str]


def _parts(
    wanted: Requirement,
) -> Iterable[tuple[str, Callable[[MemberStatus], bool], _Describe]]:
    if wanted.name is not None:
        yield f"the name {wanted.name}", lambda m: m.name == wanted.name, lambda m: m.name
    if wanted.type is not None:
        yield (
            f"the type {wanted.type}",
            lambda m: m.spec.type == wanted.type,
            lambda m: m.spec.type,
        )
    # A device that never answered may meet it: its facts are unknown.
    if wanted.soc is not None:
        yield (
            f"the SoC {wanted.soc}",
            lambda m: not _has_facts(m) or m.soc == wanted.soc,
            lambda m: m.soc or "unknown",
        )
    if wanted.hexagon is not None:
        yield (
            f"the Hexagon architecture {wanted.hexagon}",
            lambda m: not _has_facts(m) or m.hexagon == wanted.hexagon,
            lambda m: m.hexagon or "unknown",
        )
    for tag in sorted(wanted.tags):
        yield (
            f"the tag {tag}",
            lambda m, tag=tag: tag in m.tags,  # type: ignore[misc]
            lambda m: " ".join(sorted(m.tags)) or "no tags",
        )
    if wanted.min_free_bytes:
        yield (
            f"{wanted.min_free_bytes:,} free bytes",
            lambda m: m.free_bytes is None or m.free_bytes >= wanted.min_free_bytes,
            lambda m: f"{m.free_bytes or 0:,}",
        )
    yield f"a count of {wanted.count}", lambda _: True, lambda m: m.name


def _has_facts(member: MemberStatus) -> bool:
    return bool(member.soc or member.hexagon or member.free_bytes is not None)


def _why(
    part: str,
    requirement: Requirement,
    members: Sequence[MemberStatus],
    fits: Sequence[MemberStatus],
    describe: _Describe,
) -> str:
    if not members:
        return "the pool has no devices"
    if fits:
        names = ", ".join(member.name for member in fits)
        return f"{requirement.count} with {part} are wanted, there are {len(fits)} ({names})"
    others = ", ".join(f"{member.name}: {describe(member)}" for member in members[:8])
    more = f" and {len(members) - 8} more" if len(members) > 8 else ""
    return f"none has {part} ({others}{more})"
