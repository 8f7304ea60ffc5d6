"""What the ledger knows, read out."""

import sqlite3
from dataclasses import dataclass
from enum import StrEnum

from harness.pool.failure_policy import FailureRecord
from harness.pool.owner import Owner
from harness.pool.states import MemberState


@dataclass(frozen=True, slots=True)
class Facts:
    """What a device said of itself when it was last asked."""

    soc: str = ""
    hexagon: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FenceRecord:
    """What is remembered of the fence on a device since it was claimed; empty: never.

    Attributes:
        id: by which the device is known again.
        root: the work root that it is in.
        quiet: token of a lease that was released without having used the device, if that was the
            last to be; 0: none. Its claim ended all that was there, so nothing can be left to end.
    """

    id: str = ""
    root: str = ""
    quiet: int = 0


class RepairKind(StrEnum):
    """The purpose of a lease under which a device is repaired."""

    RECOVERY = "recovery"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease of one device.

    Attributes:
        granted: seconds since 1970.
        beat: `CLOCK_BOOTTIME` of the last heartbeat, good for `ttl` seconds.
    """

    key: str
    token: int
    purpose: str
    granted: float
    owner: Owner
    beat: float
    ttl: float

    @property
    def holder(self) -> str:
        """Who holds it, for people."""
        return f"{self.owner.label}: {self.purpose}" if self.purpose else self.owner.label


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device of the ledger.

    Attributes:
        leases: how many it has had.
        attempts: at recovery or probation since it was last ready; in quarantine also returns.
        due: seconds since 1970 from which on the next may be made.
        step: the step of recovery that was begun last, since it failed; empty: none.
        probed: whether it has ever been looked for.
    """

    key: str
    name: str
    state: MemberState
    reason: str
    since: float
    leases: int
    attempts: int
    due: float
    step: str
    probed: bool
    fence: FenceRecord
    facts: Facts
    lease: LeaseRow | None
    failures: tuple[FailureRecord, ...]
    """What counts against it, one of each lease, the newest last."""


OWNER_COLUMNS = "pid, started, boot, namespace, label, beat, ttl"


def owner_values(owner: Owner, beat: float, ttl: float) -> tuple[object, ...]:
    """For `OWNER_COLUMNS`."""
    return owner.pid, owner.started, owner.boot, owner.namespace, owner.label, beat, ttl


def owner_of(row: sqlite3.Row) -> Owner:
    """The owner in a row of leases or tickets."""
    return Owner(row["pid"], row["started"], row["boot"], row["namespace"], row["label"])


def lease_of(row: sqlite3.Row) -> LeaseRow:
    """A row of the table of leases."""
    return LeaseRow(
        row["key"],
        row["token"],
        row["purpose"],
        row["granted"],
        owner_of(row),
        row["beat"],
        row["ttl"],
    )


def device_of(
    row: sqlite3.Row, lease: LeaseRow | None, failures: tuple[FailureRecord, ...] = ()
) -> DeviceRow:
    """A row of the table of devices."""
    return DeviceRow(
        row["key"],
        row["name"],
        MemberState(row["state"]),
        row["reason"],
        row["since"],
        row["leases"],
        row["attempts"],
        row["due"],
        row["step"],
        bool(row["probed"]),
        FenceRecord(row["fence"], row["root"], row["quiet"]),
        Facts(row["soc"], row["hexagon"], row["free_bytes"]),
        lease,
        failures,
    )
