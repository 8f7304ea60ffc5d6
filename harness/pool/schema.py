"""Tables of the ledger: in a SQLite file, or beside the results in a database of PostgreSQL."""

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, Table, Text

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
