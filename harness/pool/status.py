"""A device of a pool as it is now: what its configuration says, with what the ledger knows."""

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
