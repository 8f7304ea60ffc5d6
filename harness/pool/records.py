"""Tables of the ledger, and what their rows are: devices, leases, fences, owners, reservations.

They lie in a SQLite file, or beside the results in a database of PostgreSQL.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, Row, Table, Text

from harness.clock import format_time
from harness.errors import one_line
from harness.pool.failure_policy import FailureRecord
from harness.pool.owner import Owner
from harness.pool.states import MemberState

METADATA = MetaData()
_Big = BigInteger().with_variant(Integer(), "sqlite")


def _text(name: str) -> "Column[str]":
    return Column(name, Text, nullable=False, server_default="")


def _number(name: str, default: int = 0) -> "Column[int]":
    return Column(name, _Big, nullable=False, server_default=str(default))


def _real(name: str) -> "Column[float]":
    return Column(name, Double, nullable=False, server_default="0")


def _id() -> "Column[int]":
    return Column("id", _Big, primary_key=True)


OWNER = ("host", "boot", "pid", "started", "namespace", "label")
"""Columns that name a process, in the order of `Owner`."""


def _holder() -> "list[Column[str] | Column[int] | Column[float]]":
    """Return the columns of a process, of its last heartbeat, and of how long that is good for."""
    names = [_number(name) if name in {"pid", "started"} else _text(name) for name in OWNER]
    return [*names, _real("beat"), _real("ttl")]


counters = Table(
    "pool_counters", METADATA, Column("name", Text, primary_key=True), _number("value")
)
devices = Table(
    "pool_devices",
    METADATA,
    Column("key", Text, primary_key=True),
    *map(_text, ("name", "spec", "state", "reason")),
    _real("since"),
    *map(_number, ("leases", "attempts")),
    _real("due"),
    *map(_text, ("fence", "root")),
    _number("token"),
    *map(_text, ("unused", "step")),
    _number("probed", 1),
    *map(_number, ("good", "returns")),
    *map(_text, ("soc", "hexagon")),
    Column("free_bytes", _Big),
)
addresses = Table("pool_addresses", METADATA, Column("spec", Text, primary_key=True), _text("key"))
leases = Table(
    "pool_leases",
    METADATA,
    Column("key", Text, primary_key=True),
    _number("token"),
    *map(_text, ("nonce", "purpose")),
    _real("granted"),
    _text("failure"),
    *_holder(),
)
grants = Table(
    "pool_grants",
    METADATA,
    Column("key", Text, primary_key=True),
    Column("token", _Big, primary_key=True),
    _text("nonce"),
)
tickets = Table(
    "pool_tickets",
    METADATA,
    _id(),
    _text("nonce"),
    _text("candidates"),
    _number("wanted", 1),
    *map(_real, ("rank", "asked")),
    _text("purpose"),
    Column("grant", Text),
    *_holder(),
    sqlite_autoincrement=True,
)
evidence = Table(
    "pool_evidence",
    METADATA,
    _id(),
    _text("key"),
    *map(_real, ("at", "began")),
    _number("lease"),
    _text("kind"),
    _real("weight"),
    *map(_text, ("text", "work", "subject")),
    _number("is_device"),
    _number("counts", 1),
    _number("settled"),
)
history = Table(
    "pool_history",
    METADATA,
    _id(),
    _text("key"),
    _real("at"),
    *map(_text, ("what", "text")),
    Column("token", _Big),
    _text("nonce"),
)
reservations = Table(
    "pool_reservations",
    METADATA,
    _id(),
    *map(_text, ("key", "user")),
    *map(_real, ("start", "end")),
    sqlite_autoincrement=True,
)
Index("pool_evidence_by_key", evidence.c.key, evidence.c.lease)
Index("pool_evidence_by_subject", evidence.c.subject)
Index("pool_history_by_key", history.c.key, history.c.id)


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
