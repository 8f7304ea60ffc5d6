"""Status of a device in a pool, and why a request for it waits."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.clock import format_time
from harness.devices.spec import DeviceSpec
from harness.errors import one_line
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
