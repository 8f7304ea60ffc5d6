"""Steps of the ledger's operations, each part of one transaction."""

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache

from harness.clock import Clock
from harness.pool.database import Database
from harness.pool.failure_policy import (
    EarlierFailure,
    FailureRecord,
    FailureReport,
    Judgement,
    QuarantineRule,
    Work,
    judge,
)
from harness.pool.history import add_event
from harness.pool.owner import Owner
from harness.pool.queue import Request, serve
from harness.pool.records import (
    OWNER_COLUMNS,
    Facts,
    LeaseRow,
    owner_of,
    owner_values,
    shown,
)
from harness.pool.states import Event, MemberState, after

COUNTS = "settled = 0 AND weight > 0 AND excuse = ''"
"""Condition of the failures that count against their devices."""
LOST = "lost its lease"
"""Kind of history entry: a lease ended otherwise than by its holder's release."""
OWNER_SLOTS = "?, ?, ?, ?, ?, ?, ?, ?"


@dataclass(frozen=True, slots=True)
class LedgerContext:
    """State shared by the parts of the ledger.

    Attributes:
        ttl_s: how long a heartbeat keeps a lease or a place in the queue.
        rule: when failures are enough for quarantine.
        has_ended: whether a process has ended.
        user: whose virtual devices the ledger means, if several users share it; else empty.
    """

    database: Database
    clock: Clock
    ttl_s: float
    rule: QuarantineRule
    has_ended: Callable[[Owner], bool]
    user: str = ""

    def address(self, spec: str) -> str:
        """Return the address of a device in the ledger: `virtual:alpha of ann`."""
        return f"{spec} of {self.user}" if self.user and spec.startswith("virtual:") else spec

    @contextmanager
    def writing(self) -> Iterator["Transaction"]:
        """Begin a transaction that alone may write."""
        with self.database.writing() as db:
            yield Transaction(db, self)

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Begin a transaction that reads one consistent view."""
        return self.database.reading()


class Transaction:
    """One transaction that may write; its steps happen together, or not at all."""

    def __init__(self, db: sqlite3.Connection, context: LedgerContext) -> None:
        self.db = db
        self._clock = context.clock
        self._ttl_s = context.ttl_s
        self._rule = context.rule
        self._has_ended = context.has_ended

    # Devices

    def set_address(self, spec: str, key: str) -> None:
        """Let an address mean that device from now on."""
        self.db.execute(
            "INSERT INTO addresses VALUES (?, ?) ON CONFLICT (spec) DO UPDATE SET key = ?",
            (spec, key, key),
        )
        self.facts_changed()

    def add_device(self, key: str, name: str, spec: str, state: MemberState, reason: str) -> None:
        """Add a device in `state`, unless the ledger has it."""
        added = self.db.execute(
            "INSERT OR IGNORE INTO devices (key, name, spec, state, reason, since)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (key, name, spec, state, reason, self._clock.now()),
        ).rowcount
        if added:
            self.add_history(key, "added", f"{state}: {reason}")

    def drop_placeholder(self, key: str, spec: str) -> None:
        """Drop an absent device whose key was its address, now that its real key is known."""
        if key == spec:
            self.db.execute("DELETE FROM devices WHERE key = ? AND state = 'absent'", (key,))

    def set_facts(self, key: str, name: str, spec: str, facts: Facts) -> None:
        """Store what a device said about itself."""
        self.db.execute(
            "UPDATE devices SET name = ?, spec = ?, soc = ?, hexagon = ?, free_bytes = ?,"
            " probed = 1 WHERE key = ?",
            (name, spec, facts.soc, facts.hexagon, facts.free_bytes, key),
        )
        self.facts_changed()

    def facts_changed(self) -> None:
        """Let all processes read the addresses and facts of devices again."""
        self.db.execute("UPDATE counters SET value = value + 1 WHERE name = 'facts'")

    def state(self, key: str) -> MemberState:
        """Return the state of a device."""
        row = self.db.execute("SELECT state FROM devices WHERE key = ?", (key,)).fetchone()
        return MemberState(row["state"])

    def apply(self, key: str, event: Event, reason: str) -> None:
        """Change the state of a device by an event; one that its state does not allow is ignored.

        A device that becomes ready is quarantined at once if its failures are over the limit.
        """
        row = self.db.execute("SELECT state FROM devices WHERE key = ?", (key,)).fetchone()
        if row is None:
            return
        state = MemberState(row["state"])
        following = after(state, event)
        if following is None or (following is state and event not in {Event.FAILED, Event.RECOVER}):
            return
        if following is state is MemberState.DRAINING:
            self.add_history(key, event, reason)
            return
        self.db.execute(
            "UPDATE devices SET state = ?, reason = ?, since = ? WHERE key = ?",
            (following, reason, self._clock.now(), key),
        )
        self.add_history(key, event, f"{state} -> {following}: {reason}")
        if following is MemberState.READY:
            self._quarantine_if_over_limit(key)

    def end_lease(self, key: str, failure: str, event: Event, reason: str) -> None:
        """End a lease by `event`, or by the failure that was reported under it."""
        if failure:
            self.reset_repairs(key)
            self.apply(key, Event.FAILED, failure)
        else:
            self.apply(key, event, reason)

    def reset_repairs(self, key: str) -> None:
        """Make the next recovery due at once, from the first step."""
        self.db.execute("UPDATE devices SET due = 0, attempts = 0, step = '' WHERE key = ?", (key,))

    def add_history(self, key: str, what: str, text: str, token: int | None = None) -> None:
        """Add an event to a device's history; see `add_event`."""
        add_event(self.db, key, self._clock.now(), what, text, token)

    def undrain(self, key: str, reason: str) -> MemberState:
        """End a drain; return the state after it."""
        self.apply(key, Event.UNDRAIN, reason)
        lease = self.db.execute("SELECT * FROM leases WHERE key = ?", (key,)).fetchone()
        if lease is not None and self.state(key) is MemberState.READY:
            self.apply(key, Event.GRANTED, f"held by {lease['label']}")
        return self.state(key)

    # Evidence

    def judge(self, key: str, report: FailureReport) -> Judgement:
        """Judge a failure on a device, store it, and take back what it contradicts."""
        device = self.db.execute("SELECT * FROM devices WHERE key = ?", (key,)).fetchone()
        earlier: list[EarlierFailure] = []
        if report.work is not None and report.weight:
            rows = self.db.execute(
                "SELECT evidence.id, key, name, at, lease,"  # noqa: S608
                f" {COUNTS} AS counts FROM evidence JOIN devices USING (key)"
                " WHERE substr(work, 1, instr(work || '/', '/') - 1) = ? AND kind = ?"
                " ORDER BY evidence.id",
                (report.work.subject, report.kind),
            )
            earlier = [
                EarlierFailure(number, other, shown(name), at, lease, counts)
                for number, other, name, at, lease, counts in rows
            ]
        judgement = judge(report, key, earlier, device["good"])
        self.db.execute(
            "INSERT INTO evidence (key, at, lease, kind, weight, text, work, excuse)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                key,
                self._clock.now(),
                device["leases"],
                report.kind,
                report.weight,
                report.text,
                report.work.id if report.work else "",
                judgement.excuse,
            ),
        )
        self.db.execute(
            "DELETE FROM evidence WHERE key = ? AND lease < ?",
            (key, device["leases"] - self._rule.memory),
        )
        if report.weight:
            what = "not counted" if judgement.excuse else "counted"
            why = judgement.excuse or f"it weighs {report.weight:g}"
            self.add_history(key, f"{what}: {report.kind}", f"{report.description}; {why}")
        if report.work is not None and judgement.taken_back:
            reason = f"{report.work.label} fails alike on {device['name']}"
            self._take_back(judgement.taken_back, reason)
        return judgement

    def _take_back(self, failures: Collection[int], reason: str) -> None:
        """Count failures no longer, and end a quarantine that rests on them."""
        keys = []
        for failure in failures:
            row = self.db.execute(
                "UPDATE evidence SET excuse = ? WHERE id = ? RETURNING key, kind, text",
                (reason, failure),
            ).fetchall()[0]
            keys.append(row["key"])
            self.add_history(row["key"], f"taken back: {row['kind']}", f"{reason}: {row['text']}")
        for key in dict.fromkeys(keys):
            if self.state(key) is MemberState.QUARANTINED and not self._is_distrusted(key):
                self.reset_repairs(key)
                self.apply(key, Event.CLEARED, reason)

    def _is_distrusted(self, key: str) -> bool:
        """Return whether a quarantine stands: by its failures, or by a failed probation run."""
        leases, attempts = self.db.execute(
            "SELECT leases, attempts FROM devices WHERE key = ?", (key,)
        ).fetchone()
        total = sum(failure.weight for failure in self._counted(key, leases))
        return total >= self._rule.limit or attempts > self._count_returns(key, leases) + 1

    def clear_work(self, token: int, work: Work) -> None:
        """Let failures of work stand against their devices, as it ended well under a lease."""
        where = self.db.execute(
            "SELECT name FROM devices JOIN leases USING (key) WHERE token = ?", (token,)
        ).fetchone()
        rows = self.db.execute(
            "UPDATE evidence SET work = '' WHERE work = ?"  # noqa: S608
            f" RETURNING key, kind, text, {COUNTS} AS counts",
            (work.id,),
        ).fetchall()
        for row in rows:
            if row["counts"] and where is not None:
                text = f"{work.label} ended well on {where['name']}: {row['text']}"
                self.add_history(row["key"], f"confirmed: {row['kind']}", text)

    def record_use(self, key: str) -> None:
        """Record the end of a lease under which a device was used, good if nothing failed."""
        self.db.execute(
            "UPDATE devices SET good = leases WHERE key = ? AND NOT EXISTS (SELECT 1 FROM evidence"
            " WHERE evidence.key = devices.key AND lease = leases AND weight > 0)",
            (key,),
        )

    def _counted(self, key: str, leases: int) -> Sequence[FailureRecord]:
        rows = self.db.execute(
            f"SELECT lease, weight, kind, text FROM evidence WHERE key = ? AND {COUNTS}"  # noqa: S608
            " ORDER BY id",
            (key,),
        )
        return self._rule.counted((FailureRecord(*row) for row in rows), leases)

    def _quarantine_if_over_limit(self, key: str) -> None:
        """Quarantine a ready device whose failures are over the limit."""
        if self.db.execute("SELECT 1 FROM leases WHERE key = ?", (key,)).fetchone():
            return  # its release decides
        leases = self.db.execute("SELECT leases FROM devices WHERE key = ?", (key,)).fetchone()[0]
        counted = self._counted(key, leases)
        total = sum(failure.weight for failure in counted)
        if counted and total >= self._rule.limit:
            kinds = ", ".join(dict.fromkeys(failure.kind for failure in counted))
            reason = f"failures weigh {total:g} in its last {self._rule.window} leases ({kinds})"
            returns = self._count_returns(key, leases)
            due = self._clock.now() + self._rule.backoff(returns)
            self.db.execute(
                "UPDATE devices SET due = ?, attempts = ? WHERE key = ?", (due, returns + 1, key)
            )
            self.apply(key, Event.DISTRUSTED, reason)

    def settle_evidence(self, key: str) -> None:
        """Let no failure before now count any more, after a probation run that was passed.

        `settled` is a counter: that of the oldest failure tells how often the device passed since.
        """
        self.db.execute("UPDATE evidence SET settled = settled + 1 WHERE key = ?", (key,))

    def _count_returns(self, key: str, leases: int) -> int:
        """Return how often the device came out of quarantine in the leases that are remembered."""
        row = self.db.execute(
            "SELECT coalesce(max(settled), 0) FROM evidence WHERE key = ? AND lease >= ?",
            (key, leases - self._rule.memory),
        ).fetchone()
        return int(row[0])

    # The queue and leases

    def devices_for(self, ticket: int) -> Sequence[str] | None:
        """Return the devices that a ticket is served with; `None` if it is not its turn."""
        free = self._keys(
            "SELECT key FROM devices WHERE state = 'ready' AND key NOT IN (SELECT key FROM leases)"
        )
        if not free:
            return None
        present = self._keys("SELECT key FROM devices WHERE state IN ('ready', 'leased')")
        requests = (
            Request(row["id"], _candidates(row["candidates"]), row["count"])
            for row in self.db.execute(
                "SELECT id, candidates, count FROM tickets WHERE token IS NULL ORDER BY id"
            )
        )
        return serve(requests, free, present - free).get(ticket)

    def next_token(self) -> int:
        """Return a token that is higher than all before it."""
        row = self.db.execute(
            "UPDATE counters SET value = value + 1 WHERE name = 'token' RETURNING value"
        ).fetchall()
        return int(row[0]["value"])

    def grant(self, key: str, token: int, owner: Owner, purpose: str) -> LeaseRow:
        """Grant a device that is ready."""
        self.db.execute("UPDATE devices SET leases = leases + 1 WHERE key = ?", (key,))
        self.apply(key, Event.GRANTED, f"held by {owner.label}")
        return self.insert_lease(key, token, owner, purpose)

    def insert_lease(self, key: str, token: int, owner: Owner, purpose: str) -> LeaseRow:
        """Insert a lease that begins now."""
        beat, granted = self._clock.boottime(), self._clock.now()
        self.db.execute(
            f"INSERT INTO leases (key, token, purpose, granted, {OWNER_COLUMNS})"  # noqa: S608
            f" VALUES (?, ?, ?, ?, {OWNER_SLOTS})",
            (key, token, purpose, granted, *owner_values(owner, beat, self._ttl_s)),
        )
        return LeaseRow(key, token, purpose, granted, owner, beat, self._ttl_s)

    def expire_dead_owners(self) -> None:
        """End the leases and tickets of dead processes, and repair contradictions."""
        owners = self.db.execute(
            "SELECT host, boot, pid, started, namespace, label FROM leases"
            " UNION SELECT host, boot, pid, started, namespace, label FROM tickets"
        ).fetchall()
        for row in owners:
            if self._has_ended(owner_of(row)):
                self._expire(
                    "host = ? AND boot = ? AND pid = ? AND started = ? AND namespace = ?"
                    " AND label = ?",
                    tuple(row),
                    lambda row: f"{row['label']} is gone",
                )
        # A beat from the future is of another boot whose id could not be read.
        now = self._clock.boottime()
        self._expire(
            "NOT (beat <= ? AND ? < beat + ttl)",
            (now, now),
            lambda row: f"{row['label']} gave no sign of life for {row['ttl']:g} s",
        )
        for row in self.db.execute(
            "SELECT key FROM devices WHERE state IN ('leased', 'probation')"
            " AND key NOT IN (SELECT key FROM leases)"
        ).fetchall():
            self.apply(row["key"], Event.EXPIRED, "it was held by nobody")
        self.db.execute("DELETE FROM leases WHERE key NOT IN (SELECT key FROM devices)")

    def _expire(
        self, condition: str, values: Sequence[object], why: Callable[[sqlite3.Row], str]
    ) -> None:
        """Delete the tickets and end the leases that meet a condition."""
        self.db.execute(f"DELETE FROM tickets WHERE {condition}", values)  # noqa: S608 - all ours
        for row in self.db.execute(
            f"DELETE FROM leases WHERE {condition} RETURNING key, token, label, ttl,"  # noqa: S608
            " failure",
            values,
        ).fetchall():
            self.add_history(row["key"], LOST, why(row), row["token"])
            self.end_lease(row["key"], row["failure"], Event.EXPIRED, why(row))

    def _keys(self, query: str) -> set[str]:
        return {row[0] for row in self.db.execute(query)}


@lru_cache(maxsize=4096)
def _candidates(text: str) -> tuple[str, ...]:
    """Return the keys of devices in a ticket; `ValueError` if they are none."""
    keys = json.loads(text)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{text!r:.80} lists no devices")
    return tuple(keys)
