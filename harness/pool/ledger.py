"""The ledger: who holds which device on this host, in transactions over one small file."""

import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from harness.clock import Clock, format_time
from harness.errors import LeaseLostError
from harness.paths import is_shared
from harness.pool.database import Database
from harness.pool.failure_policy import (
    FailureRecord,
    FailureReport,
    Judgement,
    QuarantineRule,
    Work,
)
from harness.pool.history import HistoryEntry, read_history
from harness.pool.owner import Owner, has_ended, user_name
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
    shown,
)
from harness.pool.states import Event, MemberState
from harness.pool.transaction import COUNTS, LOST, OWNER_SLOTS, LedgerContext


class Ledger:
    """The only record of who holds which device; no device is touched in a transaction.

    Devices are named by keys that stay when addresses change. All methods, and those of the parts,
    raise `LedgerError` when the file cannot be used.

    Args:
        ttl_s: how long a heartbeat keeps a lease or a place in the queue.
        rule: when failures are enough for quarantine.
        ended: whether a process has ended.

    Attributes:
        devices: addresses, facts, states and history of devices.
        tickets: queue of lease requests.
        leases: granted leases.
        repairs: recoveries and probation runs.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        ttl_s: float,
        rule: QuarantineRule,
        ended: Callable[[Owner], bool] = has_ended,
    ) -> None:
        self._database = database
        user = user_name(os.geteuid()) if is_shared(database.path.parent) else ""
        self._context = LedgerContext(database, clock, ttl_s, rule, ended, user)
        self.devices = DeviceRecords(self._context)
        self.tickets = Tickets(self._context)
        self.leases = Leases(self._context)
        self.repairs = Repairs(self._context)

    def version(self) -> int:
        """Return a number that changes when another process has changed the ledger."""
        return self._database.version()

    def reconcile(self) -> None:
        """End the leases and tickets of dead processes, and repair contradictions."""
        with self._context.writing() as t:
            t.expire_dead_owners()


_LOSSES = f"""
SELECT key, at, what, text FROM history AS loss WHERE id > :after AND id <= :last AND (
    what = '{Event.DISTRUSTED}' OR what IN ('{Event.LOST}', '{Event.GAVE_UP}') AND COALESCE((
        SELECT what NOT IN ('{Event.LOST}', '{Event.GAVE_UP}') FROM history
        WHERE key = loss.key AND id < loss.id AND what IN (
            '{Event.LOST}', '{Event.GAVE_UP}', '{Event.FOUND}', '{Event.RECOVERED}',
            '{Event.GRANTED}', '{Event.PASSED}', '{Event.UNDRAIN}'
        ) ORDER BY id DESC LIMIT 1
    ), 1)
) ORDER BY id
"""  # noqa: S608 - all ours
"""History entries that say that a device was lost, after one that says that it was there."""


class DeviceRecords:
    """Addresses, facts, states and history of devices, by their keys."""

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    def ledger_id(self) -> str:
        """Return the id by which devices tell this ledger from others."""
        query = "SELECT value FROM counters WHERE name = 'id'"
        with self._context.reading() as db:
            row = db.execute(query).fetchone()
        if row is None:
            with self._context.writing() as t:
                number = secrets.randbits(62)
                t.db.execute("INSERT OR IGNORE INTO counters VALUES ('id', ?)", (number,))
                row = t.db.execute(query).fetchone()
        return f"{row[0]:016x}"

    def note_token(self, token: int) -> None:
        """Grant no token up to this one, which a device has: the ledger may be an older copy."""
        with self._context.writing() as t:
            t.db.execute("UPDATE counters SET value = max(value, ?) WHERE name = 'token'", (token,))

    def keys_of(self, specs: Collection[str]) -> dict[str, str]:
        """Return the keys of the devices that were last reached under these addresses."""
        addresses = {self._context.address(spec): spec for spec in specs}
        with self._context.reading() as db:
            rows = db.execute("SELECT spec, key FROM addresses").fetchall()
        return {addresses[row["spec"]]: row["key"] for row in rows if row["spec"] in addresses}

    def facts_version(self) -> int:
        """Return a number that rises when an address or the facts of a device may have changed."""
        with self._context.reading() as db:
            return int(db.execute("SELECT value FROM counters WHERE name = 'facts'").fetchone()[0])

    def record_found(self, key: str, name: str, spec: str, facts: Facts) -> None:
        """Record that a device answered under `spec`, which means this device from now on."""
        spec = self._context.address(spec)
        with self._context.writing() as t:
            row = t.db.execute("SELECT key FROM addresses WHERE spec = ?", (spec,)).fetchone()
            t.set_address(spec, key)
            if row is not None and row["key"] != key:
                t.drop_placeholder(row["key"], spec)
            t.add_device(key, name, spec, MemberState.READY, "it answered")
            t.set_facts(key, name, spec, facts)
            t.apply(key, Event.FOUND, "it answered")

    def record_absent(self, name: str, spec: str, reason: str, *, probed: bool = True) -> str:
        """Record that no device answers under `spec`, or that none was `probed`; return its key."""
        spec = self._context.address(spec)
        with self._context.writing() as t:
            row = t.db.execute("SELECT key FROM addresses WHERE spec = ?", (spec,)).fetchone()
            key = spec if row is None else str(row["key"])
            t.set_address(spec, key)
            t.add_device(key, name, spec, MemberState.ABSENT, reason)
            t.db.execute("UPDATE devices SET probed = ? WHERE key = ?", (probed, key))
            t.apply(key, Event.LOST, reason)
            return key

    def set_free_bytes(self, key: str, free_bytes: int | None) -> None:
        """Store the free space of a device."""
        with self._context.writing() as t:
            t.db.execute("UPDATE devices SET free_bytes = ? WHERE key = ?", (free_bytes, key))
            t.facts_changed()

    def set_fence(self, key: str, fence: FenceRecord) -> None:
        """Store the fence of a device."""
        with self._context.writing() as t:
            t.db.execute(
                "UPDATE devices SET fence = ?, root = ?, quiet = ? WHERE key = ?",
                (fence.id, fence.root, fence.quiet, key),
            )

    def fence_of(self, key: str) -> FenceRecord:
        """Return the stored fence of a device."""
        with self._context.reading() as db:
            row = db.execute(
                "SELECT fence, root, quiet FROM devices WHERE key = ?", (key,)
            ).fetchone()
        return FenceRecord(*row) if row else FenceRecord()

    def rows(self, keys: Collection[str]) -> dict[str, DeviceRow]:
        """Return the devices among `keys` that the ledger has, by key."""
        wanted = tuple(keys)
        among = f"WHERE key IN ({', '.join('?' * len(wanted))})"
        with self._context.reading() as db:
            leases = {
                row["key"]: lease_of(row)
                for row in db.execute(f"SELECT * FROM leases {among}", wanted)  # noqa: S608
            }
            failures: dict[str, list[FailureRecord]] = {}
            for row in db.execute(
                f"SELECT key, lease, weight, kind, text FROM evidence {among}"  # noqa: S608
                f" AND {COUNTS} ORDER BY id",
                wanted,
            ):
                kind, text = shown(row["kind"]), shown(row["text"])
                failure = FailureRecord(row["lease"], row["weight"], kind, text)
                failures.setdefault(row["key"], []).append(failure)
            return {
                row["key"]: device_of(
                    row,
                    leases.get(row["key"]),
                    tuple(self._context.rule.counted(failures.get(row["key"], ()), row["leases"])),
                )
                for row in db.execute(f"SELECT * FROM devices {among}", wanted)  # noqa: S608
            }

    def history(self, key: str, *, since: float = 0.0) -> list[HistoryEntry]:
        """Return the history of a device, oldest first; see `read_history`."""
        with self._context.reading() as db:
            return read_history(db, key, since)

    def take_losses(self, subscriber: str) -> list[tuple[str, HistoryEntry]]:
        """Return the keys of devices that became quarantined or absent, once for each subscriber.

        A device that stays absent is absent once, however often it is looked for. A subscriber
        hears of what happens after its first call.
        """
        cursor = f"notified:{subscriber}"
        query = "SELECT value FROM counters WHERE name = ?"
        newest = "SELECT COALESCE(MAX(id), 0) FROM history"
        with self._context.reading() as db:
            row, last = db.execute(query, (cursor,)).fetchone(), db.execute(newest).fetchone()[0]
        if row is not None and row["value"] == last:
            return []
        with self._context.writing() as t:
            row, last = (
                t.db.execute(query, (cursor,)).fetchone(),
                t.db.execute(newest).fetchone()[0],
            )
            t.db.execute(
                "INSERT INTO counters VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (cursor, last),
            )
            if row is None:
                return []
            rows = t.db.execute(_LOSSES, {"after": row["value"], "last": last}).fetchall()
        return [(key, HistoryEntry(at, what, text)) for key, at, what, text in rows]

    def add_history(self, key: str, what: str, text: str) -> None:
        """Add an entry to a device's history."""
        with self._context.writing() as t:
            t.add_history(key, what, text)

    def apply(self, key: str, event: Event, reason: str) -> MemberState:
        """Change the state of a device by an event, whoever holds it; return the state after it."""
        with self._context.writing() as t:
            if event is Event.UNDRAIN:
                return t.undrain(key, reason)
            if event in {Event.FAILED, Event.RECOVER}:
                t.reset_repairs(key)
            t.apply(key, event, reason)
            return t.state(key)


class Tickets:
    """Queue of the lease requests of all processes of this host."""

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    def enqueue(self, owner: Owner, candidates: Sequence[str], count: int) -> int:
        """Add a request at the end of the queue; only `try_grant` keeps it there beyond the TTL."""
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
        """Replace the devices that would do for a ticket, which keeps its place."""
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
            t.expire_dead_owners()
            now = self._context.clock.boottime()
            kept = t.db.execute("UPDATE tickets SET beat = ? WHERE id = ?", (now, ticket)).rowcount
            if not kept:
                raise LeaseLostError(f"ticket {ticket}", 0, "its process slept for too long")
            keys = t.devices_for(ticket)
            if keys is None:
                return None
            token = t.next_token()
            t.db.execute("UPDATE tickets SET token = ? WHERE id = ?", (token, ticket))
            return [t.grant(key, token, owner, purpose) for key in keys]

    def settle(self, ticket: int) -> None:
        """Remove a ticket that was served or given up."""
        with self._context.writing() as t:
            t.db.execute("DELETE FROM tickets WHERE id = ?", (ticket,))

    def put_back(self, ticket: int) -> None:
        """Let a ticket wait again at its place, as its devices could not be used."""
        with self._context.writing() as t:
            t.db.execute("UPDATE tickets SET token = NULL WHERE id = ?", (ticket,))

    def waiting(self) -> list[Owner]:
        """Return the waiting owners, in FIFO order."""
        with self._context.reading() as db:
            rows = db.execute("SELECT * FROM tickets WHERE token IS NULL ORDER BY id").fetchall()
        return [owner_of(row) for row in rows]


class Leases:
    """Granted leases. A lease is named by its token, and may have several devices."""

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    @property
    def ttl_s(self) -> float:
        """Seconds that a heartbeat keeps a lease."""
        return self._context.ttl_s

    def renew(self, leases: Mapping[int, int]) -> dict[int, float | None]:
        """Renew leases; return until when each is valid (`CLOCK_BOOTTIME`), `None` if it is lost.

        A lease that has run out is never revived, even if nobody took the device yet.

        Args:
            leases: number of devices of each lease, by its token.
        """
        with self._context.writing() as t:
            now = self._context.clock.boottime()
            until: dict[int, float | None] = {}
            for token, count in leases.items():
                kept = t.db.execute(
                    "UPDATE leases SET beat = ? WHERE token = ? AND beat + ttl > ?",
                    (now, token, now),
                ).rowcount
                t.db.execute("UPDATE tickets SET beat = ? WHERE token = ?", (now, token))
                until[token] = now + self._context.ttl_s if kept == count else None
            return until

    def holds(self, token: int, key: str) -> bool:
        """Return whether the lease of that token still has the device."""
        with self._context.reading() as db:
            row = db.execute(
                "SELECT beat + ttl AS until FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
        return row is not None and row["until"] > self._context.clock.boottime()

    def in_use(self, *, besides: str) -> bool:
        """Return whether anybody holds a device other than `besides`."""
        with self._context.reading() as db:
            row = db.execute("SELECT 1 FROM leases WHERE key != ?", (besides,)).fetchone()
        return row is not None

    def report(self, key: str, token: int, report: FailureReport) -> Judgement | None:
        """Judge and store a failure that the holder of a lease reports.

        Returns:
            What the failure counts against; `None` if the lease is lost.
        """
        with self._context.writing() as t:
            row = t.db.execute(
                "SELECT failure FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
            if row is None:
                return None
            judgement = t.judge(key, report)
            if report.recover:
                t.db.execute(
                    "UPDATE leases SET failure = ? WHERE key = ? AND token = ?",
                    (report.text, key, token),
                )
            return judgement

    def report_success(self, token: int, work: Work) -> None:
        """Record that work ended well under a lease: what failed it before was not its fault."""
        with self._context.reading() as db:
            failed = db.execute("SELECT 1 FROM evidence WHERE work = ?", (work.id,)).fetchone()
        if failed:
            with self._context.writing() as t:
                t.clear_work(token, work)

    def release(
        self,
        token: int,
        keys: Collection[str],
        reason: str = "released",
        *,
        used: Collection[str] = (),
        unused: Collection[str] = (),
        taken_by: str = "",
    ) -> frozenset[str]:
        """End the lease of that token on these devices; return those that it still held.

        Failures that were reported during the lease decide the next state of a device.

        Args:
            used: devices that were used under the lease.
            unused: devices that were fenced for the lease, but never used under it.
            taken_by: the person who took the devices from their holder, for `why_lost`.
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
                if key in used:
                    t.record_use(key)
                if key in unused:
                    t.db.execute("UPDATE devices SET quiet = ? WHERE key = ?", (token, key))
                if taken_by:
                    t.add_history(key, LOST, f"{taken_by} took it back", token)
                t.end_lease(key, row[0]["failure"], Event.RELEASED, reason)
        return frozenset(released)

    def record_loss(self, token: int, key: str, text: str) -> None:
        """Record that a device itself refused the holder of that token, unless it is known."""
        with self._context.writing() as t:
            held = t.db.execute(
                "SELECT 1 FROM leases WHERE key = ? AND token = ?", (key, token)
            ).fetchone()
            known = t.db.execute(
                "SELECT 1 FROM history WHERE key = ? AND what = ? AND token = ?", (key, LOST, token)
            ).fetchone()
            if held is not None and known is None:
                t.add_history(key, LOST, text, token)

    def why_lost(self, token: int, keys: Collection[str]) -> str:
        """Return who ended the lease of that token and when; empty if its holder did."""
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


_INTERRUPTED = "its process ended in the middle of it"
_REPAIRABLE = {MemberState.RECOVERING, MemberState.QUARANTINED, MemberState.ABSENT}


class Repairs:
    """Recoveries and probation runs, each under a lease of its own."""

    def __init__(self, context: LedgerContext) -> None:
        self._context = context

    def due(self) -> Sequence[str]:
        """Return the devices for which `begin` would give a lease, the longest overdue first."""
        states = ", ".join(f"'{state}'" for state in _REPAIRABLE)
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
        """Return a lease for the repair of a device; `None` if it needs none or is not due.

        Args:
            force: repair it before it is due.
        """
        with self._context.writing() as t:
            t.expire_dead_owners()
            row = t.db.execute("SELECT * FROM devices WHERE key = ?", (key,)).fetchone()
            busy = t.db.execute("SELECT 1 FROM leases WHERE key = ?", (key,)).fetchone()
            if row is None or busy:
                return None
            # A wall clock that was set back must not put the repair off.
            if row["since"] <= self._context.clock.now() < row["due"] and not force:
                return None
            state = MemberState(row["state"])
            if state not in _REPAIRABLE:
                return None
            t.db.execute("UPDATE devices SET probed = 1 WHERE key = ?", (key,))
            if state is MemberState.ABSENT:
                t.apply(key, Event.RECOVER, f"{owner.label} looks for it again")
            if state is MemberState.QUARANTINED:
                t.apply(key, Event.TRIED, "a probation run decides")
            token = t.next_token()
            probation = state is MemberState.QUARANTINED
            kind = RepairKind.PROBATION if probation else RepairKind.RECOVERY
            return t.insert_lease(key, token, owner, kind)

    def record_step(self, key: str, token: int, step: str) -> None:
        """Store the step that begins: after an interruption, recovery goes on with it."""
        with self._context.writing() as t:
            t.db.execute(
                "UPDATE devices SET step = ? WHERE key = ?"
                " AND key IN (SELECT key FROM leases WHERE token = ?)",
                (step, key, token),
            )

    def interrupt(self, key: str, token: int) -> None:
        """End a recovery that is cut off; it is due again at once."""
        with self._context.writing() as t:
            done = t.db.execute(
                "DELETE FROM leases WHERE key = ? AND token = ?", (key, token)
            ).rowcount
            if done and t.state(key) is MemberState.LEASED:  # drained and undrained meanwhile
                t.apply(key, Event.FAILED, _INTERRUPTED)
            elif done:
                t.add_history(key, "recovery", _INTERRUPTED)

    def end(
        self, key: str, token: int, event: Event, reason: str, *, retry_in_s: float = 0.0
    ) -> bool:
        """End a repair by `event`; return whether its lease still held.

        After a probation run that was passed, no earlier failure counts any more.

        Args:
            retry_in_s: when the next attempt is due, after a repair that failed.
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
