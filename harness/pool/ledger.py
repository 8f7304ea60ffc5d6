"""The ledger: who holds which device on this host, in transactions over one small file."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.clock import Clock, format_time
from harness.errors import LeaseLostError
from harness.pool.database import Database
from harness.pool.failure_policy import FailureRecord, FailureReport, QuarantineRule
from harness.pool.owner import Owner, has_ended
from harness.pool.records import (
    OWNER_COLUMNS,
    DeviceRow,
    Facts,
    FenceRecord,
    LeaseRow,
    RepairKind,
    device_of,
    lease_of,
    owner_of,
    owner_values,
)
from harness.pool.states import Event, MemberState
from harness.pool.transaction import LOST, OWNER_SLOTS, LedgerContext


class Ledger:
    """The one place that says who holds which device.

    Devices are named by keys that stay when addresses change. All methods, and those of the parts,
    raise `LedgerError` when the file cannot be used.

    Args:
        ttl_s: how long a heartbeat keeps a lease or a place in the queue.
        rule: when evidence is enough for quarantine.
        is_dead: whether a process has ended.

    Attributes:
        devices: what is known of them.
        tickets: who waits.
        leases: who holds what.
        repairs: who recovers what, or tries it.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        ttl_s: float,
        rule: QuarantineRule,
        is_dead: Callable[[Owner], bool] = has_ended,
    ) -> None:
        self._database = database
        self._context = LedgerContext(database, clock, ttl_s, rule, is_dead)
        self.devices = DeviceRecords(self._context)
        self.tickets = Tickets(self._context)
        self.leases = Leases(self._context)
        self.repairs = Repairs(self._context)

    def version(self) -> int:
        """A number that changes when another process has changed the ledger."""
        return self._database.version()

    def reconcile(self) -> None:
        """End what belongs to processes that are gone, and repair what contradicts itself."""
        with self._context.writing() as t:
            t.expire_dead_owners(self._context.is_dead)


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a device; `at` is in seconds since 1970."""

    at: float
    what: str
    text: str


class DeviceRecords:
    """What is known of devices, whoever holds them. They are named by keys.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    def keys_of(self, specs: Collection[str]) -> dict[str, str]:
        """The devices that were last reached under those addresses, as far as any were."""
        with self._context.reading() as db:
            rows = db.execute("SELECT spec, key FROM addresses").fetchall()
        return {row["spec"]: row["key"] for row in rows if row["spec"] in specs}

    def facts_version(self) -> int:
        """A number that rises whenever an address or the facts of a device may have changed."""
        with self._context.reading() as db:
            return int(db.execute("SELECT value FROM counters WHERE name = 'facts'").fetchone()[0])

    def record_found(self, key: str, name: str, spec: str, facts: Facts) -> None:
        """A device answered under `spec`: from now on that address means this device."""
        with self._context.writing() as t:
            known = t.db.execute("SELECT key FROM addresses WHERE spec = ?", (spec,)).fetchone()
            t.set_address(spec, key)
            if known is not None and known["key"] != key:
                t.drop_placeholder(known["key"], spec)
            t.add_device(key, name, spec, MemberState.READY, "it answered")
            t.set_facts(key, name, spec, facts)
            t.apply(key, Event.FOUND, "it answered")

    def record_absent(self, name: str, spec: str, reason: str, *, probed: bool = True) -> str:
        """A device is not there under `spec`, or nobody `probed` it yet; gives its key."""
        with self._context.writing() as t:
            row = t.db.execute("SELECT key FROM addresses WHERE spec = ?", (spec,)).fetchone()
            key = spec if row is None else str(row["key"])
            t.set_address(spec, key)
            t.add_device(key, name, spec, MemberState.ABSENT, reason)
            t.db.execute("UPDATE devices SET probed = ? WHERE key = ?", (probed, key))
            t.apply(key, Event.LOST, reason)
            return key

    def set_free_bytes(self, key: str, free_bytes: int | None) -> None:
        """Remember what a device has free now."""
        with self._context.writing() as t:
            t.db.execute("UPDATE devices SET free_bytes = ? WHERE key = ?", (free_bytes, key))
            t.facts_changed()

    def set_fence(self, key: str, fence: FenceRecord) -> None:
        """Remember the fence on a device."""
        with self._context.writing() as t:
            t.db.execute(
                "UPDATE devices SET fence = ?, root = ?, quiet = ? WHERE key = ?",
                (fence.id, fence.root, fence.quiet, key),
            )

    def fence_of(self, key: str) -> FenceRecord:
        """What is remembered of the fence on a device."""
        with self._context.reading() as db:
            row = db.execute(
                "SELECT fence, root, quiet FROM devices WHERE key = ?", (key,)
            ).fetchone()
        return FenceRecord(*row) if row else FenceRecord()

    def rows(self, keys: Collection[str]) -> dict[str, DeviceRow]:
        """Those of `keys` that are known, as they are now."""
        wanted = tuple(keys)
        among = f"WHERE key IN ({', '.join('?' * len(wanted))})"
        with self._context.reading() as db:
            leases = {
                row["key"]: lease_of(row)
                for row in db.execute(f"SELECT * FROM leases {among}", wanted)  # noqa: S608
            }
            evidence: dict[str, list[FailureRecord]] = {}
            for row in db.execute(
                f"SELECT key, lease, weight, kind, text FROM evidence {among}"  # noqa: S608
                " AND settled = 0 AND weight > 0 ORDER BY id",
                wanted,
            ):
                found = FailureRecord(row["lease"], row["weight"], row["kind"], row["text"])
                evidence.setdefault(row["key"], []).append(found)
            rows = db.execute(f"SELECT * FROM devices {among}", wanted).fetchall()  # noqa: S608
        return {
            row["key"]: device_of(
                row,
                leases.get(row["key"]),
                tuple(self._context.rule.counted(evidence.get(row["key"], ()), row["leases"])),
            )
            for row in rows
        }

    def history(self, key: str) -> list[HistoryEntry]:
        """What happened to a device, oldest first, as far as it is kept."""
        with self._context.reading() as db:
            rows = db.execute(
                "SELECT at, what, text, token FROM history WHERE key = ? ORDER BY id", (key,)
            ).fetchall()
        return [
            HistoryEntry(at, what, text if token is None else f"token {token}: {text}")
            for at, what, text, token in rows
        ]

    def add_history(self, key: str, what: str, text: str) -> None:
        """Write something into a device's history."""
        with self._context.writing() as t:
            t.add_history(key, what, text)

    def apply(self, key: str, event: Event, reason: str) -> MemberState:
        """Let something happen to a device that nobody's lease protects; gives its state then."""
        with self._context.writing() as t:
            if event is Event.UNDRAIN:
                return t.undrain(key, reason)
            if event in {Event.FAILED, Event.RECOVER}:
                t.reset_repairs(key)
            t.apply(key, event, reason)
            return t.state(key)


class Tickets:
    """The queue of all processes of this host.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    def enqueue(self, owner: Owner, candidates: Sequence[str], count: int) -> int:
        """A place in the queue, behind all others; it has to be kept by `try_grant`."""
        with self._context.writing() as t:
            cursor = t.db.execute(
                f"INSERT INTO tickets (candidates, count, {OWNER_COLUMNS})"  # noqa: S608
                f" VALUES (?, ?, {OWNER_SLOTS})",
                (
                    json.dumps(list(candidates)),
                    count,
                    *owner_values(owner, self._context.clock.boottime(), self._context.ttl_s),
                ),
            )
            return int(cursor.lastrowid or 0)

    def set_candidates(self, ticket: int, candidates: Sequence[str]) -> None:
        """Other devices for a ticket, which keeps its place."""
        with self._context.writing() as t:
            t.db.execute(
                "UPDATE tickets SET candidates = ? WHERE id = ?",
                (json.dumps(list(candidates)), ticket),
            )

    def try_grant(self, ticket: int, owner: Owner, purpose: str = "") -> list[LeaseRow] | None:
        """Grant a ticket its devices under one token, if it is its turn; `None` if it is not.

        The ticket stays, out of the way of others, until `settle` ends it or `put_back` returns
        it to its place.

        Raises:
            LeaseLostError: the ticket is gone, for its process slept longer than the TTL.
        """
        with self._context.writing() as t:
            t.expire_dead_owners(self._context.is_dead)
            now = self._context.clock.boottime()
            kept = t.db.execute("UPDATE tickets SET beat = ? WHERE id = ?", (now, ticket)).rowcount
            if not kept:
                raise LeaseLostError(f"ticket {ticket}", 0, "its process slept for too long")
            keys = t.devices_for(ticket)
            if keys is None:
                return None
            token = t.next_token()
            t.db.execute("UPDATE tickets SET token = ? WHERE id = ?", (token, ticket))
            return [t.lease(key, token, owner, purpose) for key in keys]

    def settle(self, ticket: int) -> None:
        """A ticket was served, or is not wanted any more."""
        with self._context.writing() as t:
            t.db.execute("DELETE FROM tickets WHERE id = ?", (ticket,))

    def put_back(self, ticket: int) -> None:
        """A ticket's devices could not be used: it waits again, at the place that it had."""
        with self._context.writing() as t:
            t.db.execute("UPDATE tickets SET token = NULL WHERE id = ?", (ticket,))

    def waiting(self) -> list[Owner]:
        """Who waits, first the one who came first."""
        with self._context.reading() as db:
            rows = db.execute("SELECT * FROM tickets WHERE token IS NULL ORDER BY id").fetchall()
        return [owner_of(row) for row in rows]


class Leases:
    """Who holds what. A lease is named by its token, and may have several devices.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    @property
    def ttl_s(self) -> float:
        """How long a heartbeat keeps a lease."""
        return self._context.ttl_s

    def renew(self, leases: Mapping[int, int]) -> dict[int, float | None]:
        """Keep leases; gives the `CLOCK_BOOTTIME` until which each is good, `None` if it is lost.

        One that has run out is never revived, even if nobody took the device yet.

        Args:
            leases: the number of devices of each, by its token.
        """
        with self._context.writing() as t:
            now = self._context.clock.boottime()
            good: dict[int, float | None] = {}
            for token, count in leases.items():
                kept = t.db.execute(
                    "UPDATE leases SET beat = ? WHERE token = ? AND beat + ttl > ?",
                    (now, token, now),
                ).rowcount
                t.db.execute("UPDATE tickets SET beat = ? WHERE token = ?", (now, token))
                good[token] = now + self._context.ttl_s if kept == count else None
            return good

    def holds(self, token: int, key: str) -> bool:
        """Whether the lease of that token still has the device."""
        with self._context.reading() as db:
            row = db.execute(
                "SELECT beat + ttl AS until FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
        return row is not None and row["until"] > self._context.clock.boottime()

    def in_use(self, *, besides: str) -> bool:
        """Whether anybody holds a device other than `besides`."""
        with self._context.reading() as db:
            row = db.execute("SELECT 1 FROM leases WHERE key != ?", (besides,)).fetchone()
        return row is not None

    def raise_token(self, token: int, above: int, count: int) -> int | None:
        """A higher token for a lease, where a device knows of a higher one; `None` if it is lost.

        That happens when the ledger was removed, or when another host leases the same device.

        Args:
            count: the devices of the lease. One that lost any of them is lost: with a higher token
                it would shut out who has that device now.
        """
        with self._context.writing() as t:
            now = self._context.clock.boottime()
            held = t.db.execute(
                "SELECT count(*) FROM leases WHERE token = ? AND beat + ttl > ?", (token, now)
            ).fetchone()[0]
            if held != count:
                return None
            t.db.execute("UPDATE counters SET value = max(value, ?) WHERE name = 'token'", (above,))
            new = t.next_token()
            t.db.execute("UPDATE leases SET token = ? WHERE token = ?", (new, token))
            t.db.execute("UPDATE tickets SET token = ? WHERE token = ?", (new, token))
            return new

    def report(self, key: str, token: int, report: FailureReport) -> bool:
        """Evidence from the holder of a lease; `False` if it holds it no more."""
        with self._context.writing() as t:
            row = t.db.execute(
                "SELECT failure FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
            if row is None:
                return False
            number = t.db.execute("SELECT leases FROM devices WHERE key = ?", (key,)).fetchone()[0]
            t.db.execute(
                "INSERT INTO evidence (key, at, lease, kind, weight, text) VALUES (?,?,?,?,?,?)",
                (
                    key,
                    self._context.clock.now(),
                    number,
                    report.kind,
                    report.weight,
                    report.text,
                ),
            )
            t.db.execute(
                "DELETE FROM evidence WHERE key = ? AND lease < ?",
                (key, number - self._context.rule.memory),
            )
            if report.recover:
                t.db.execute(
                    "UPDATE leases SET failure = ? WHERE key = ? AND token = ?",
                    (report.text, key, token),
                )
            return True

    def release(
        self,
        token: int,
        keys: Collection[str],
        reason: str = "released",
        *,
        unused: Collection[str] = (),
        taken_by: str = "",
    ) -> frozenset[str]:
        """End the lease of that token on those devices; gives those that it still held.

        What was reported during it decides what a device does next.

        Args:
            unused: those that were fenced for the lease, but never used under it.
            taken_by: who took the devices from their holder, whom `why_lost` tells.
        """
        released = set()
        with self._context.writing() as t:
            for key in keys:
                row = t.db.execute(
                    "DELETE FROM leases WHERE key = ? AND token = ? RETURNING failure",
                    (key, token),
                ).fetchall()
                if not row:
                    continue
                released.add(key)
                if key in unused:
                    t.db.execute("UPDATE devices SET quiet = ? WHERE key = ?", (token, key))
                if taken_by:
                    t.record_loss(key, token, f"{taken_by} took it back")
                t.end_lease(key, row[0]["failure"], Event.RELEASED, reason)
        return frozenset(released)

    def why_lost(self, token: int, keys: Collection[str]) -> str:
        """Who ended the lease of that token, and when; empty where that was its holder."""
        with self._context.reading() as db:
            for key in keys:
                row = db.execute(
                    "SELECT at, text FROM history WHERE key = ? AND what = ? AND token = ?"
                    " ORDER BY id DESC LIMIT 1",
                    (key, LOST, token),
                ).fetchone()
                if row is not None:
                    return f"{row['text']}, at {format_time(row['at'], self._context.clock.now())}"
        return ""


CUT_OFF = "its process ended in the middle of it"
_WORK = {MemberState.RECOVERING, MemberState.QUARANTINED, MemberState.ABSENT}


class Repairs:
    """Which devices are to be worked on, and who does.

    All methods raise `LedgerError` when the file cannot be used.
    """

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    def due(self) -> Sequence[str]:
        """The devices for which `begin` would do something now, first who waits for it longest."""
        states = ", ".join(f"'{state}'" for state in _WORK)
        now = self._context.clock.now()
        with self._context.reading() as db:
            rows = db.execute(
                f"SELECT key FROM devices WHERE state IN ({states})"  # noqa: S608
                " AND (due <= ? OR since > ?) AND key NOT IN (SELECT key FROM leases)"
                " ORDER BY due, since, key",
                (now, now),
            ).fetchall()
        return [row["key"] for row in rows]

    def begin(self, key: str, owner: Owner, *, force: bool = False) -> LeaseRow | None:
        """A lease to recover a device or to try one in quarantine; `None` if it is not to be done.

        `force` does not wait until the next attempt is due.
        """
        with self._context.writing() as t:
            t.expire_dead_owners(self._context.is_dead)
            row = t.db.execute("SELECT * FROM devices WHERE key = ?", (key,)).fetchone()
            busy = t.db.execute("SELECT 1 FROM leases WHERE key = ?", (key,)).fetchone()
            if row is None or busy:
                return None
            # A clock that was set back since would put it off for as long.
            if row["since"] <= self._context.clock.now() < row["due"] and not force:
                return None
            state = MemberState(row["state"])
            if state not in _WORK:
                return None
            t.db.execute("UPDATE devices SET probed = 1 WHERE key = ?", (key,))
            if state is MemberState.ABSENT:
                t.apply(key, Event.RECOVER, "looked for again")
            if state is MemberState.QUARANTINED:
                t.apply(key, Event.TRIED, "a probation run decides")
            token = t.next_token()
            probation = state is MemberState.QUARANTINED
            kind = RepairKind.PROBATION if probation else RepairKind.RECOVERY
            return t.insert_lease(key, token, owner, kind)

    def record_step(self, key: str, token: int, step: str) -> None:
        """A step of recovery begins: if it is cut off, the next process begins with this step."""
        with self._context.writing() as t:
            t.db.execute(
                "UPDATE devices SET step = ? WHERE key = ?"
                " AND key IN (SELECT key FROM leases WHERE token = ?)",
                (step, key, token),
            )

    def interrupt(self, key: str, token: int) -> None:
        """Leave a recovery to the next process that has the time for it, which is due at once."""
        with self._context.writing() as t:
            done = t.db.execute(
                "DELETE FROM leases WHERE key = ? AND token = ?", (key, token)
            ).rowcount
            if done and t.state(key) is MemberState.LEASED:  # drained and undrained meanwhile
                t.apply(key, Event.FAILED, CUT_OFF)
            elif done:
                t.add_history(key, "recovery", CUT_OFF)

    def end(
        self, key: str, token: int, event: Event, reason: str, *, retry_in_s: float = 0.0
    ) -> bool:
        """How the work ended: the device goes on by `event`; after a failure, not before a while.

        A probation that was passed settles all evidence from before it.
        """
        with self._context.writing() as t:
            done = t.db.execute(
                "DELETE FROM leases WHERE key = ? AND token = ?", (key, token)
            ).rowcount
            if not done:
                return False
            if event in {Event.RECOVERED, Event.PASSED}:
                t.reset_repairs(key)
            else:
                t.db.execute(
                    "UPDATE devices SET attempts = attempts + 1, due = ?, step = '' WHERE key = ?",
                    (self._context.clock.now() + retry_in_s, key),
                )
            if event is Event.PASSED:
                t.settle_evidence(key)
            t.apply(key, event, reason)
            return True
