"""Status of a device in a pool, and what it says to someone who waits for the device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.clock import format_time
from harness.devices.spec import DeviceSpec
from harness.errors import one_line
from harness.pool.states import MemberState

OnProgress = Callable[[str], None]
"""Called with a sentence for each step of a long operation, and for its result."""


def ignore_progress(_: str) -> None:
    """Drop a progress message."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A device of the pool as it is now.

    Attributes:
        name: by which the pool knows it; unique there.
        reason: why it is in this state, for people.
        since: seconds since 1970 at which it came into this state.
        holder: who holds its lease, for people; empty for nobody.
        token: fencing token of that lease.
        failures: what counts against it: the heaviest of each lease, newest last, for people.
        weight: what they come to; `limit` brings quarantine.
        seen: what speaks against `state`, without having asked the device: nobody has looked at
            it yet, or its virtual device does not run; empty: nothing.
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


_MOST_MEMBERS = 6
_AWAY = {MemberState.ABSENT, MemberState.RECOVERING}
_DISTRUSTED = {MemberState.QUARANTINED, MemberState.PROBATION}

WaitReasons = frozenset[tuple[str, str]]
"""Names of devices, each with what kind of reason it has."""


def describe_wait(members: Sequence[MemberStatus], *, own: str = "") -> str:
    """Who holds each of those devices since when, or why it is out.

    Args:
        own: the holder that waits: what it holds is being claimed.
    """
    told = [_reason(member, own) for member in members[:_MOST_MEMBERS]]
    if len(members) > _MOST_MEMBERS:
        told.append(f"and {len(members) - _MOST_MEMBERS} more")
    return "; ".join(told) or "the pool has no such device now"


def wait_reasons(members: Sequence[MemberStatus]) -> WaitReasons:
    """What is another one only when a person would say that the reason is another.

    A device that is looked for again and again goes from absent to recovering and back.
    """
    return frozenset((member.name, _kind(member)) for member in members)


def _kind(member: MemberStatus) -> str:
    if member.state in _AWAY:
        return "away"
    if member.state in _DISTRUSTED:
        return "distrusted"
    return f"held by {member.holder}" if member.holder else f"{member.state}: {member.reason}"


def _reason(member: MemberStatus, own: str) -> str:
    name, since = one_line(member.name, 80), format_time(member.since, time.time())
    repaired = member.state in _AWAY | _DISTRUSTED
    if own and member.holder == own:
        return f"{name} is being claimed since {since}"
    if member.holder and not repaired:
        return f"{name} is held by {one_line(member.holder)} since {since}"
    if member.state is MemberState.READY:
        return f"{name} is ready, but not granted yet"
    reason = f" ({one_line(member.reason, 120)})" if member.reason else ""
    return f"{name} is {member.state}{reason} since {since}"
