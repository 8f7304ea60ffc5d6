"""A device of a pool as it is now: what its configuration says, with what the ledger knows."""

import shlex

from harness.pool.base import MemberState, MemberStatus
from harness.pool.members import Member
from harness.pool.rows import DeviceRow

NOT_LOOKED = "not looked at yet"


def status_of(member: Member, row: DeviceRow, limit: float = 0.0) -> MemberStatus:
    """A device that the ledger knows.

    Args:
        limit: of what may count against it.
    """
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
        failures=tuple(found.text for found in row.failures),
        weight=sum(found.weight for found in row.failures),
        limit=limit,
        seen=NOT_LOOKED if row.reason == NOT_LOOKED else "",
    )


def left_alone(name: str, row: DeviceRow) -> str:
    """That nobody goes on with a device's recovery, and what to do; empty if that is not so."""
    if row.state is not MemberState.RECOVERING or row.lease is not None:
        return ""
    begun = f" ({row.step} was begun)" if row.step else ""
    recover = f"`qnnfarm pool recover {shlex.quote(name)}`"
    return f"nobody works on it at the moment{begun}; who next waits for it does, or {recover}"


def not_looked_at(member: Member, now: float) -> MemberStatus:
    """A device that nobody has looked at; `now` in seconds since 1970."""
    return MemberStatus(
        name=member.name,
        spec=member.spec,
        tags=member.tags,
        state=MemberState.ABSENT,
        reason="`qnnfarm pool probe` looks",
        since=now,
        seen=NOT_LOOKED,
    )
