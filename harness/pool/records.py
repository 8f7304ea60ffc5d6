"""Records of the ledger: devices, leases, fences, owners, reservations."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Row

from harness.clock import format_time
from harness.errors import one_line
from harness.pool.failure_policy import FailureRecord
from harness.pool.owner import Owner
from harness.pool.schema import OWNER
from harness.pool.states import MemberState

_LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Facts:
    """Answers of a device about itself when it was last asked."""

    soc: str = ""
    hexagon: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FenceRecord:
    """The fence on a device since it was last claimed; empty if it never was.

    Attributes:
        id: identifies the device.
        root: the work root that holds the fence.
        quiet: the last grant, as `TOKEN-NONCE`, if its lease was released without having used the
            device. The claim of that lease ended all processes there, so none can be left.
    """

    id: str = ""
    root: str = ""
    quiet: str = ""


class RepairKind(StrEnum):
    """The purpose of a lease under which a device is repaired."""

    RECOVERY = "recovery"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease of one device.

    Attributes:
        token: of this device; it rises with each of its leases.
        grant: nonce of the grant, which no other has; devices that are granted together share it.
        holder: for people.
        until: the `CLOCK_BOOTTIME` of this host until which a lease is valid that was granted now;
            0 for others.
    """

    key: str
    token: int
    grant: str
    purpose: str
    holder: str
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A time for which a device is reserved.

    Attributes:
        number: unique in the ledger.
        key: of the device.
        user: account of the processes that get the device, on any host.
        start, end: seconds since 1970.
    """

    number: int
    key: str
    user: str
    start: float
    end: float

    def describe(self, now: float) -> str:
        """Describe it for people: `reserved by ann from 14:00:00 to 16:00:00 (number 7)`."""
        start, end = format_time(self.start, now), format_time(self.end, now)
        return f"reserved by {self.user} from {start} to {end} (number {self.number})"


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device of the ledger.

    Attributes:
        since: seconds since 1970 at which it came into this state.
        leases: number of leases so far.
        attempts: recoveries or probation runs since it was last ready; in quarantine also the
            returns to it.
        step: the recovery step that was begun last; empty if none was since it failed.
        probed: whether it was ever looked for.
        failures: the failures that count against it, one of each lease, the newest last.
        reservations: those that have not ended, by their start.
    """

    key: str
    state: MemberState
    reason: str
    since: float
    leases: int
    attempts: int
    step: str
    probed: bool
    facts: Facts
    lease: LeaseRow | None
    failures: tuple[FailureRecord, ...]
    reservations: tuple[Reservation, ...]


def shown(text: str) -> str:
    """Return a text of the ledger, of any user, for people: one line without controls."""
    return one_line(text, _LONGEST_TEXT)


def owner_of(row: Row[Any]) -> Owner:
    """Return the owner in a row of leases or tickets."""
    return Owner(shown(row.host), row.boot, row.pid, row.started, row.namespace, shown(row.label))


def columns_of(owner: Owner) -> dict[str, object]:
    """Return the columns of a process in rows of leases and tickets."""
    return {name: getattr(owner, name) for name in OWNER}


def holder_of(row: Row[Any]) -> str:
    """Return the holder in a row of leases or tickets, for people."""
    owner, purpose = owner_of(row), shown(row.purpose)
    return f"{owner}: {purpose}" if purpose else str(owner)


def lease_of(row: Row[Any], until: float = 0.0) -> LeaseRow:
    """Return a row of the table of leases; `until` as in `LeaseRow`."""
    return LeaseRow(row.key, row.token, row.nonce, row.purpose, holder_of(row), until)


def device_of(
    row: Row[Any],
    lease: LeaseRow | None,
    failures: tuple[FailureRecord, ...],
    reservations: tuple[Reservation, ...],
) -> DeviceRow:
    """Return a row of the table of devices, with its rows of other tables."""
    return DeviceRow(
        row.key,
        MemberState(row.state),
        shown(row.reason),
        row.since,
        row.leases,
        row.attempts,
        shown(row.step),
        bool(row.probed),
        Facts(shown(row.soc), shown(row.hexagon), row.free_bytes),
        lease,
        failures,
        reservations,
    )
