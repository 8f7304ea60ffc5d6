"""The ledger: the holders of devices, in short transactions over one database."""

import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Row, func, or_, select

from harness.clock import Clock, format_time
from harness.devices.socket_owner import user_name
from harness.errors import LeaseLostError, LedgerError
from harness.pool.config import QuarantineConfig
from harness.pool.database import Database, place_of
from harness.pool.failure_policy import FailureReport, Work
from harness.pool.history import (
    HistoryEntry,
    add_event,
    confirm,
    failures_of,
    has_failed,
    judge,
    read_history,
    record_use,
    settle,
)
from harness.pool.owner import Owner, has_ended, host_id
from harness.pool.queue import (
    Request,
    add_reservations,
    cancel_reservation,
    current_reservations,
    keep,
    move_reservations,
    served,
    upcoming_reservations,
)
from harness.pool.records import (
    DeviceRow,
    Facts,
    FenceRecord,
    LeaseRow,
    RepairKind,
    Reservation,
    addresses,
    columns_of,
    counters,
    device_of,
    devices,
    grants,
    history,
    holder_of,
    lease_of,
    leases,
    owner_of,
    shown,
    tickets,
)
from harness.pool.requirement import Waiting
from harness.pool.states import Event, MemberState, after

_LOST = "lost its lease"
"""Kind of history entry: a lease ended otherwise than by its holder's release."""
_FURTHEST = 1_000_000
"""No device has a token so far above all that were granted."""
_FORMER = 32
"""Grants of a device that its next claim names: so many claims in a row may fail."""
_PRIORITY_S = 600.0
"""A request goes before those of the next lower priority that came so much earlier, or later."""
_INTERRUPTED = "its process ended in the middle of it"
_AWAY = frozenset({Event.LOST, Event.GAVE_UP})
_THERE = frozenset({Event.FOUND, Event.RECOVERED, Event.GRANTED, Event.PASSED, Event.UNDRAIN})
_REPAIRABLE = frozenset({MemberState.RECOVERING, MemberState.QUARANTINED, MemberState.ABSENT})

P = ParamSpec("P")
T = TypeVar("T")
_Method = Callable[Concatenate["Ledger", Connection, P], T]
_Public = Callable[Concatenate["Ledger", P], T]


def _within(transaction: Callable[..., Any]) -> Callable[[_Method[P, T]], _Public[P, T]]:
    """Run a method in a transaction of its own."""

    def decorate(method: _Method[P, T]) -> _Public[P, T]:
        @wraps(method)
        def run(self: "Ledger", /, *args: P.args, **kwargs: P.kwargs) -> T:
            result: T = transaction(self.database, lambda db: method(self, db, *args, **kwargs))
            return result

        return run

    return decorate


_reads = _within(Database.read)
_writes = _within(Database.write)
_writes_quietly = _within(partial(Database.write, tell=False))
"""For changes that nobody waits for, such as a heartbeat."""


class Ledger:
    """The only record of the holders of devices; no device is touched in a transaction.

    Devices are named by keys that stay when addresses change, leases by the nonces of their grants,
    so that one of a ledger that went back, or was copied, is none of ours. Each device has a token
    with each lease, which only rises.
    Each method is one transaction, which is tried again if a server went away meanwhile, or a few.
    All raise `LedgerError` when the database cannot be used.

    Args:
        clock: of heartbeats and events; a server has its own.
        ttl_s: how long a heartbeat keeps a lease or a place in the queue.
        rule: when failures are enough for quarantine.
        ended: whether a process has ended.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        ttl_s: float,
        rule: QuarantineConfig,
        ended: Callable[[Owner], bool] = has_ended,
    ) -> None:
        self.database = database
        self.ttl_s = ttl_s
        self._clock = clock
        self._rule = rule
        self._has_ended = ended
        self._user = user_name(os.geteuid()) if database.path is None else ""

    def reconcile(self) -> None:
        """End the leases and tickets of dead processes, and repair contradictions.

        Waiting processes do so, too, at least once a second.
        """
        self.database.write(self._expire_dead_owners, tell=False)

    # Devices

    def address(self, spec: str) -> str:
        """Return the address of a device as the ledger has it.

        On a server, virtual devices are each user's own, `virtual:alpha of ann`, and what is
        reached without a host's name is each host's, `android:R5 on lab1`.
        """
        if self._user and spec.startswith("virtual:"):
            spec = f"{spec} of {self._user}"
        is_here = "@" not in spec and not spec.startswith("linux:")
        return f"{spec} on {host_id()}" if self.database.path is None and is_here else spec

    def ledger_id(self) -> str:
        """Return the id by which devices tell this ledger from others.

        Raises:
            LedgerError: its file is a copy: two ledgers of one id would give one device twice.
        """
        number, own_place = self._counter("id"), self._counter("place")
        path = self.database.path
        place = 0 if path is None else place_of(path)
        if number is None or own_place is None:
            number, own_place = self._make_id(place)
        if own_place != place:
            reason = "it is a copy of another ledger, was restored from one, or was moved"
            raise LedgerError(
                self.database.location,
                f"{reason}: `qnnfarm pool new-id`, so that devices tell the two apart",
            )
        return f"{number:016x}"

    @_writes_quietly
    def _make_id(self, db: Connection, place: int) -> tuple[int, int]:
        values = {"id": secrets.randbits(62), "place": place}
        for name, value in values.items():
            if _counter(db, name) is None:
                _set_counter(db, name, value)
        return _counter(db, "id") or 0, _counter(db, "place") or 0

    @_writes
    def renew_id(self, db: Connection) -> None:
        """Become a ledger of its own; holders and requests, which are those of another, go."""
        path = self.database.path
        for table in (leases, tickets, grants):
            db.execute(table.delete())
        _set_counter(db, "id", secrets.randbits(62))
        _set_counter(db, "place", 0 if path is None else place_of(path))

    @_reads
    def _counter(self, db: Connection, name: str) -> int | None:
        return _counter(db, name)

    @_writes_quietly
    def pass_token(self, db: Connection, key: str, grant: str, token: int, text: str) -> int | None:
        """Return a new token for the lease of a device that says it has one as high, or a higher.

        The ledger went back to an earlier state, or has a copy, or the device lies: its own tokens
        rise, and those of no other device.

        Returns:
            `None` if the lease is lost, or no grant of any ledger explains that token.
        """
        lease = _lease(db, key, grant)
        if lease is None or not lease.token <= token <= (_counter(db, "token") or 0) + _FURTHEST:
            return None
        self._add_event(db, key, "went back", f"{text}; this ledger knows no such grant")
        self._keep_grant(db, key, token + 1, grant)
        of_lease = leases.c.key == key, leases.c.nonce == grant
        db.execute(leases.update().where(*of_lease).values(token=token + 1))
        return token + 1

    @_reads
    def former_grants(self, db: Connection, lease: LeaseRow) -> list[str]:
        """Return the last grants of a device before a lease, as `TOKEN-NONCE`; all have ended."""
        before = grants.c.key == lease.key, grants.c.token < lease.token
        query = select(grants).where(*before).order_by(grants.c.token.desc()).limit(_FORMER)
        return [f"{row.token}-{row.nonce}" for row in db.execute(query)]

    @_reads
    def keys_of(self, db: Connection, specs: Collection[str]) -> dict[str, str]:
        """Return the keys of the devices that were last reached under these addresses."""
        by_address = {self.address(spec): spec for spec in specs}
        rows = db.execute(select(addresses))
        return {by_address[row.spec]: row.key for row in rows if row.spec in by_address}

    def facts_version(self) -> int:
        """Return a number that rises when an address or the facts of a device may have changed."""
        return self._counter("facts") or 0

    @_writes
    def record_found(self, db: Connection, key: str, name: str, spec: str, facts: Facts) -> None:
        """Record that a device answered under `spec`, which means this device from now on."""
        spec = self.address(spec)
        other = self._set_address(db, spec, key)
        if other not in {None, key} and other == spec:  # a placeholder, until its key was known
            absent = devices.c.key == other, devices.c.state == MemberState.ABSENT
            db.execute(devices.delete().where(*absent))
            move_reservations(db, spec, key)
        row = _device(db, key)
        if row is not None and row.spec != spec and row.state != MemberState.ABSENT:
            return  # a second address, or a device that says that it is this one
        self._add_device(db, key, name, spec, MemberState.READY, "it answered")
        _update(
            db,
            key,
            name=name,
            spec=spec,
            soc=facts.soc,
            hexagon=facts.hexagon,
            free_bytes=facts.free_bytes,
            probed=1,
        )
        self._apply(db, key, Event.FOUND, "it answered")

    @_writes
    def record_absent(
        self, db: Connection, name: str, spec: str, reason: str, *, probed: bool = True
    ) -> str:
        """Record that no device answers under `spec`, or that none was `probed`; return its key."""
        spec = self.address(spec)
        key = db.scalar(select(addresses.c.key).where(addresses.c.spec == spec))
        key = spec if key is None else key
        self._set_address(db, spec, key)
        self._add_device(db, key, name, spec, MemberState.ABSENT, reason)
        _update(db, key, probed=int(probed))
        self._apply(db, key, Event.LOST, reason)
        return key

    @_writes_quietly
    def set_free_bytes(self, db: Connection, key: str, free_bytes: int | None) -> None:
        """Store the free space of a device."""
        _update(db, key, free_bytes=free_bytes)
        _facts_changed(db)

    @_writes_quietly
    def set_fence(self, db: Connection, key: str, fence: FenceRecord) -> None:
        """Store the fence of a device."""
        _update(db, key, fence=fence.id, root=fence.root, unused=fence.quiet)

    @_reads
    def fence_of(self, db: Connection, key: str) -> FenceRecord:
        """Return the stored fence of a device."""
        row = _device(db, key)
        return FenceRecord(row.fence, row.root, row.unused) if row else FenceRecord()

    @_reads
    def rows(self, db: Connection, keys: Collection[str]) -> dict[str, DeviceRow]:
        """Return the devices among `keys` that the ledger has, by key."""
        keys = tuple(keys)
        rows = db.execute(select(leases).where(leases.c.key.in_(keys)))
        lease_by_key = {row.key: lease_of(row) for row in rows}
        failures = failures_of(db, keys)
        upcoming = upcoming_reservations(db, self._now(db), keys)
        return {
            row.key: device_of(
                row,
                lease_by_key.get(row.key),
                failures.get(row.key, ()),
                tuple(reservation for reservation in upcoming if reservation.key == row.key),
            )
            for row in db.execute(select(devices).where(devices.c.key.in_(keys)))
        }

    @_reads
    def history(self, db: Connection, key: str, *, since: float = 0.0) -> list[HistoryEntry]:
        """Return the history of a device, oldest first; see `read_history`."""
        return read_history(db, key, since)

    def take_losses(self, subscriber: str) -> list[tuple[str, HistoryEntry]]:
        """Return the keys of devices that became quarantined or absent, once for each subscriber.

        A device that stays absent is absent once, however often it is looked for. A subscriber
        hears of losses after its first call.
        """
        cursor = f"notified:{subscriber}"
        return self._take_losses(cursor) if self._has_news(cursor) else []

    @_reads
    def _has_news(self, db: Connection, cursor: str) -> bool:
        return _counter(db, cursor) != (db.scalar(select(func.max(history.c.id))) or 0)

    @_writes_quietly
    def _take_losses(self, db: Connection, cursor: str) -> list[tuple[str, HistoryEntry]]:
        last = db.scalar(select(func.max(history.c.id))) or 0
        before = _counter(db, cursor)
        _set_counter(db, cursor, last)
        if before is None:
            return []
        kinds = history.c.what.in_(_AWAY | {Event.DISTRUSTED})
        news = select(history).where(history.c.id > before, history.c.id <= last, kinds)
        return [
            (row.key, HistoryEntry(row.at, row.what, row.text))
            for row in db.execute(news.order_by(history.c.id)).all()
            if row.what == Event.DISTRUSTED or not _was_away(db, row)
        ]

    @_writes_quietly
    def add_history(self, db: Connection, key: str, what: str, text: str) -> None:
        """Add an entry to a device's history."""
        self._add_event(db, key, what, text)

    @_writes
    def apply(self, db: Connection, key: str, event: Event, reason: str) -> MemberState:
        """Change the state of a device by an event, and return it; any holder keeps its lease."""
        if event in {Event.FAILED, Event.RECOVER}:
            _reset_repairs(db, key)
        self._apply(db, key, event, reason)
        if event is Event.UNDRAIN:
            lease = _lease(db, key)
            if lease is not None and _state(db, key) is MemberState.READY:
                self._apply(db, key, Event.GRANTED, f"held by {shown(lease.label)}")
        return _state(db, key)

    # Reservations

    def reserve(
        self, keys: Collection[str], user: str, start: float | None, duration_s: float
    ) -> list[Reservation]:
        """Reserve devices for a user, all or none.

        Args:
            start: seconds since 1970; `None` is now.

        Returns:
            The reservations of others that are in the way; empty if the devices are reserved.
        """
        begin = self.now() if start is None else start
        end = begin + duration_s

        def add(db: Connection) -> list[Reservation]:
            now = self._now(db)
            obstacles = add_reservations(db, keys, user, begin, end, now)
            if not obstacles:
                text = f"by {user} from {format_time(begin, now)} to {format_time(end, now)}"
                for key in keys:
                    self._add_event(db, key, "reserved", text)
                self._end_reserved(db)
            return obstacles

        return self.database.write(add)

    @_reads
    def now(self, db: Connection) -> float:
        """Return the ledger's time in seconds since 1970."""
        return self._now(db)

    @_writes
    def cancel_reservation(self, db: Connection, number: int, by: str) -> Reservation | None:
        """Cancel the reservation of that number and return it; `None` if there is none."""
        now = self._now(db)
        reservation = cancel_reservation(db, number, now)
        if reservation is not None:
            text = f"{by} cancelled what was {reservation.describe(now)}"
            self._add_event(db, reservation.key, "reservation", text)
        return reservation

    # The queue

    def enqueue(
        self,
        owner: Owner,
        candidates: Sequence[str],
        count: int,
        *,
        priority: int = 0,
        purpose: str = "",
    ) -> int:
        """Add a request at the end of the queue; only `try_grant` keeps it there beyond the TTL.

        Args:
            candidates: keys of the devices that would do, best first.
            priority: it goes before older requests of lower priorities, unless they are older by
                ten minutes for each step.
            purpose: for people.
        """
        nonce = secrets.token_hex(8)  # by which a transaction that is done again finds it

        def add(db: Connection) -> int:
            number = db.scalar(select(tickets.c.id).where(tickets.c.nonce == nonce))
            if number is not None:
                return int(number)
            beat = self._beat(db)
            ticket = tickets.insert().values(
                nonce=nonce,
                candidates=json.dumps(list(candidates)),
                wanted=count,
                rank=beat - priority * _PRIORITY_S,
                asked=self._now(db),
                purpose=purpose,
                beat=beat,
                ttl=self.ttl_s,
                **columns_of(owner),
            )
            return int(db.execute(ticket.returning(tickets.c.id)).scalar_one())

        return self.database.write(add, tell=False)

    @_writes_quietly
    def set_candidates(self, db: Connection, ticket: int, candidates: Sequence[str]) -> None:
        """Replace the devices that would do for a ticket, which keeps its place."""
        text = json.dumps(list(candidates))
        others = tickets.c.id == ticket, tickets.c.candidates != text
        db.execute(tickets.update().where(*others).values(candidates=text))

    def try_grant(self, ticket: int) -> list[LeaseRow] | None:
        """Grant a ticket its devices under one token, if it is its turn; `None` if it is not.

        The ticket stays, out of the way of others, until `settle` ends it or `put_back` returns
        it to its place.

        Raises:
            LeaseLostError: the ticket is gone, for its process slept longer than the TTL.
        """
        must_act, is_silent = self._look(ticket)
        if must_act:
            return self._try_grant(ticket)
        if is_silent:
            self._show_life(ticket)
        return None

    @_reads
    def _look(self, db: Connection, ticket: int) -> tuple[bool, bool]:
        """Return whether a ticket's turn has come, or the dead are in its way; and its silence.

        Each waiting process asks at each change, so each looks only at the processes that have its
        devices or come before it for them: hundreds may wait.
        """
        beat = self._beat(db)
        row = db.execute(select(tickets).where(tickets.c.id == ticket)).one_or_none()
        if row is None or row.grant is not None or self._is_ahead(row, beat):
            return True, False
        is_silent = beat - row.beat > self.ttl_s / 4
        requests = self._kept_devices(db)
        if ticket in served(requests) or (is_silent and self._is_dead(row, beat, lambda _: False)):
            return True, is_silent
        keys = _candidates(row.candidates)
        holders = select(leases).where(leases.c.key.in_(keys))
        before = {requests[key].ticket for key in keys if key in requests} - {ticket}
        blocking = (holders, select(tickets).where(tickets.c.id.in_(before)))
        ended = cache(self._has_ended)
        must_act = any(
            self._is_ahead(other, beat) or self._is_dead(other, beat, ended)
            for query in blocking
            for other in db.execute(query)
        ) or bool(self._reserved_from_holders(db))
        return must_act, is_silent

    @_writes_quietly
    def _show_life(self, db: Connection, ticket: int) -> None:
        db.execute(tickets.update().where(tickets.c.id == ticket).values(beat=self._beat(db)))

    @_reads
    def turns_before(self, db: Connection, ticket: int) -> int:
        """Return how often each of a ticket's devices goes to older tickets before it, about."""
        older: list[frozenset[str]] = []
        for row in db.execute(_QUEUE):
            keys = frozenset(_candidates(row.candidates))
            if row.id == ticket:
                return sum(not keys.isdisjoint(other) for other in older) // max(1, len(keys))
            older.append(keys)
        return 0

    @_writes_quietly
    def _try_grant(self, db: Connection, ticket: int) -> list[LeaseRow] | None:
        until = self._clock.boottime() + self.ttl_s
        self._expire_dead_owners(db)
        beat = self._beat(db)
        renewal = tickets.update().where(tickets.c.id == ticket).values(beat=beat)
        row = db.execute(renewal.returning(tickets)).one_or_none()
        if row is None:
            raise LeaseLostError(f"ticket {ticket}", 0, "its process slept for too long")
        if row.grant is not None:  # granted, but a server went away before it could say so
            granted = leases.update().where(leases.c.nonce == row.grant).values(beat=beat)
            return [lease_of(one, until) for one in db.execute(granted.returning(leases))] or None
        keys = served(self._kept_devices(db)).get(ticket)
        if keys is None:
            return None
        token, grant, owner = _next_token(db), secrets.token_hex(8), owner_of(row)
        db.execute(tickets.update().where(tickets.c.id == ticket).values(grant=grant))
        for key in keys:
            _update(db, key, leases=devices.c.leases + 1)
            self._apply(db, key, Event.GRANTED, f"held by {owner.label}")
        return [self._insert_lease(db, key, token, grant, owner, row.purpose) for key in keys]

    @_writes_quietly
    def settle(self, db: Connection, ticket: int) -> None:
        """Remove a ticket that was served."""
        db.execute(tickets.delete().where(tickets.c.id == ticket))

    @_writes
    def withdraw(self, db: Connection, ticket: int) -> None:
        """Remove a ticket that may keep devices from others."""
        db.execute(tickets.delete().where(tickets.c.id == ticket))

    @_writes
    def put_back(self, db: Connection, ticket: int) -> None:
        """Let a ticket wait again at its place, as its devices could not be used."""
        db.execute(tickets.update().where(tickets.c.id == ticket).values(grant=None))

    @_reads
    def waiting(self, db: Connection) -> list[Waiting]:
        """Return the requests that wait, in the order in which they come next."""
        return [
            Waiting(holder_of(row), row.asked, _candidates(row.candidates))
            for row in db.execute(_QUEUE)
        ]

    # Leases

    @_writes_quietly
    def renew(self, db: Connection, counts: Mapping[str, int]) -> dict[str, float | None]:
        """Renew leases; return until when each is valid (`CLOCK_BOOTTIME`), `None` if it is lost.

        A lease that has run out is never revived, even if nobody took the device yet.

        Args:
            counts: number of devices of each lease, by its grant.
        """
        until = self._clock.boottime() + self.ttl_s
        self._end_reserved(db)
        beat = self._beat(db)
        valid = {}
        for grant, count in counts.items():
            live = leases.c.nonce == grant, leases.c.beat + leases.c.ttl > beat
            renewed = db.execute(leases.update().where(*live).values(beat=beat))
            db.execute(tickets.update().where(tickets.c.grant == grant).values(beat=beat))
            valid[grant] = until if renewed.rowcount == count else None
        return valid

    @_reads
    def holds(self, db: Connection, grant: str, key: str) -> bool:
        """Return whether the lease of that grant still has the device."""
        lease = _lease(db, key, grant)
        return lease is not None and lease.beat + lease.ttl > self._beat(db)

    @_reads
    def knows(self, db: Connection, grant: str) -> bool:
        """Return whether the ledger has the lease of that grant, even if it has run out."""
        return db.scalar(select(leases.c.key).where(leases.c.nonce == grant).limit(1)) is not None

    @_reads
    def in_use(self, db: Connection, *, besides: str) -> bool:
        """Return whether anybody holds a device other than `besides`."""
        return db.scalar(select(leases.c.key).where(leases.c.key != besides).limit(1)) is not None

    @_writes_quietly
    def report(self, db: Connection, key: str, grant: str, report: FailureReport) -> str | None:
        """Judge and store a failure that the holder of a lease reports.

        Returns:
            Why it counts against its work instead of the device; empty if it does not, `None` if
            the lease is lost.
        """
        lease = _lease(db, key, grant)
        if lease is None:
            return None
        now = self._now(db)
        began = now - max(0.0, self._clock.now() - report.work.began) if report.work else now
        blame = judge(db, key, report, at=now, began=began)
        if report.recover:
            of_lease = leases.c.key == key, leases.c.nonce == grant
            db.execute(leases.update().where(*of_lease).values(failure=report.text))
        return blame

    def report_success(self, grant: str, work: Work) -> None:
        """Record that work ended well under a lease: where it failed, it was the device's fault."""
        if self.database.read(lambda db: has_failed(db, work)):
            self.database.write(lambda db: confirm(db, work, grant), tell=False)

    @_writes
    def release(
        self,
        db: Connection,
        grant: str,
        keys: Collection[str],
        reason: str = "released",
        *,
        used: Collection[str] = (),
        unused: Collection[str] = (),
        taken_by: str = "",
    ) -> frozenset[str]:
        """End the lease of that grant on these devices; return those that it still held.

        Failures that were reported during the lease decide the next state of a device.

        Args:
            used: devices that were used under the lease.
            unused: devices that were fenced for the lease, but never used under it.
            taken_by: the person who took the devices from their holder, for `why_lost`.
        """
        released = set()
        for key in keys:
            lease = _lease(db, key, grant)
            if lease is None:
                continue
            db.execute(leases.delete().where(leases.c.key == key))
            released.add(key)
            if key in used:
                record_use(db, key)
            if key in unused:
                _update(db, key, unused=f"{lease.token}-{grant}")
            if taken_by:
                self._add_event(db, key, _LOST, f"{taken_by} took it back", lease)
            self._end_lease(db, lease, Event.RELEASED, reason)
        return frozenset(released)

    @_writes_quietly
    def record_loss(self, db: Connection, grant: str, key: str, text: str) -> None:
        """Record that a device itself refused the holder of that grant, unless it is known."""
        lease = _lease(db, key, grant)
        if lease is not None and _loss(db, grant, key) is None:
            self._add_event(db, key, _LOST, text, lease)

    @_reads
    def why_lost(self, db: Connection, grant: str, keys: Collection[str]) -> str:
        """Return why the lease of that grant was lost, and when; empty if its holder ended it."""
        for key in keys:
            if (row := _loss(db, grant, key)) is not None:
                return f"{shown(row.text)}, at {format_time(row.at, self._now(db))}"
        return ""

    # Repairs: recoveries and probation runs, each under a lease of its own

    @_reads
    def due_repairs(self, db: Connection) -> Sequence[str]:
        """Return the devices that `begin_repair` would lease, the longest overdue first."""
        now = self._now(db)
        due = (
            select(devices.c.key)
            .where(
                devices.c.state.in_(_REPAIRABLE),
                or_(devices.c.due <= now, devices.c.since > now),
                devices.c.key.not_in(select(leases.c.key)),
            )
            .order_by(devices.c.due, devices.c.since, devices.c.key)
        )
        return list(db.scalars(due))

    @_writes
    def begin_repair(
        self, db: Connection, key: str, owner: Owner, *, force: bool = False
    ) -> LeaseRow | None:
        """Return a lease for the repair of a device; `None` if it needs none or is not due.

        Args:
            force: repair it before it is due.
        """
        self._expire_dead_owners(db)
        row = _device(db, key)
        if row is None or _lease(db, key) is not None:
            return None
        # A wall clock that was set back must not put the repair off.
        if row.since <= self._now(db) < row.due and not force:
            return None
        state = MemberState(row.state)
        if state not in _REPAIRABLE:
            return None
        _update(db, key, probed=1)
        if state is MemberState.ABSENT:
            self._apply(db, key, Event.RECOVER, f"{owner} looks for it again")
        probation = state is MemberState.QUARANTINED
        if probation:
            self._apply(db, key, Event.TRIED, "a probation run decides")
        kind = RepairKind.PROBATION if probation else RepairKind.RECOVERY
        return self._insert_lease(db, key, _next_token(db), secrets.token_hex(8), owner, kind)

    @_writes_quietly
    def record_step(self, db: Connection, key: str, grant: str, step: str) -> None:
        """Store the step that begins: after an interruption, recovery goes on with it."""
        if _lease(db, key, grant) is not None:
            _update(db, key, step=step)

    @_writes
    def interrupt_repair(self, db: Connection, key: str, grant: str) -> None:
        """End a recovery that is cut off; it is due again at once."""
        if not _delete_lease(db, key, grant):
            return
        if _state(db, key) is MemberState.LEASED:  # drained and undrained meanwhile
            self._apply(db, key, Event.FAILED, _INTERRUPTED)
        else:
            self._add_event(db, key, "recovery", _INTERRUPTED)

    @_writes
    def end_repair(
        self,
        db: Connection,
        key: str,
        grant: str,
        event: Event,
        reason: str,
        *,
        retry_in_s: float = 0.0,
    ) -> bool:
        """End a repair by `event`; return whether its lease still held.

        After a probation run that was passed, no earlier failure counts any more.

        Args:
            retry_in_s: when the next attempt is due, after a repair that failed.
        """
        if not _delete_lease(db, key, grant):
            return False
        if event in {Event.RECOVERED, Event.PASSED}:
            _reset_repairs(db, key)
        else:
            due = self._now(db) + retry_in_s
            _update(db, key, attempts=devices.c.attempts + 1, due=due, step="")
        if event is Event.PASSED:
            _update(db, key, returns=devices.c.returns + 1, good=0)
            settle(db, key)
        self._apply(db, key, event, reason)
        return True

    # Steps of transactions

    def _now(self, db: Connection) -> float:
        return self.database.times(db, self._clock)[0]

    def _beat(self, db: Connection) -> float:
        return self.database.times(db, self._clock)[1]

    def _set_address(self, db: Connection, spec: str, key: str) -> str | None:
        """Let an address mean that device from now on; return the device that it meant before."""
        before: str | None = db.scalar(select(addresses.c.key).where(addresses.c.spec == spec))
        if before is None:
            db.execute(addresses.insert().values(spec=spec, key=key))
        else:
            db.execute(addresses.update().where(addresses.c.spec == spec).values(key=key))
        _facts_changed(db)
        return before

    def _add_device(
        self, db: Connection, key: str, name: str, spec: str, state: MemberState, reason: str
    ) -> None:
        """Add a device in `state`, unless the ledger has it."""
        if _device(db, key) is None:
            values = {"name": name, "spec": spec, "state": state, "reason": reason}
            db.execute(devices.insert().values(key=key, since=self._now(db), **values))
            self._add_event(db, key, "added", f"{state}: {reason}")

    def _apply(self, db: Connection, key: str, event: Event, reason: str) -> None:
        """Change the state of a device by an event; ignore one that its state does not allow."""
        row = _device(db, key)
        if row is None:
            return
        state = MemberState(row.state)
        following = after(state, event)
        if following is None or (following is state and event not in {Event.FAILED, Event.RECOVER}):
            return
        if following is state is MemberState.DRAINING:
            self._add_event(db, key, event, reason)
            return
        _update(db, key, state=following, reason=reason, since=self._now(db))
        self._add_event(db, key, event, f"{state} -> {following}: {reason}")
        if following is MemberState.READY:
            self._quarantine_if_over_limit(db, key)

    def _add_event(
        self, db: Connection, key: str, what: str, text: str, lost: Row[Any] | None = None
    ) -> None:
        of_lease = () if lost is None else (lost.token, lost.nonce)
        add_event(db, key, self._now(db), what, text, *of_lease)

    def _end_lease(self, db: Connection, lease: Row[Any], event: Event, reason: str) -> None:
        """End a lease by `event`, or by the failure that was reported under it."""
        if lease.failure:
            _reset_repairs(db, lease.key)
            self._apply(db, lease.key, Event.FAILED, shown(lease.failure))
        else:
            self._apply(db, lease.key, event, reason)

    def _quarantine_if_over_limit(self, db: Connection, key: str) -> None:
        device = _device(db, key)
        if device is None or _lease(db, key) is not None:
            return  # the release of its lease decides
        failures = failures_of(db, (key,)).get(key, ())
        total = sum(failure.weight for failure in failures)
        if not failures or total < self._rule.limit:
            return
        # Work that no other device has run yet may itself be bad.
        unsure = not device.returns and all(failure.subject for failure in failures)
        kinds = ", ".join(dict.fromkeys(failure.kind for failure in failures))
        reason = f"failures weigh {total:g} since its last good lease ({kinds})"
        wait_s = 0.0 if unsure else self._rule.backoff(device.returns)
        _update(db, key, due=self._now(db) + wait_s, attempts=device.returns + 1)
        self._apply(db, key, Event.DISTRUSTED, reason)

    def _kept_devices(self, db: Connection) -> Mapping[str, Request]:
        """Return the free devices that tickets get now or keep; see `keep`."""
        leased = frozenset(db.scalars(select(leases.c.key)))
        present = select(devices.c.key, devices.c.state).where(
            devices.c.state.in_([MemberState.READY, MemberState.LEASED])
        )
        states = {row.key: row.state for row in db.execute(present)}
        free = {key for key, state in states.items() if state == MemberState.READY} - leased
        if not free:
            return {}
        reserved = current_reservations(db, self._now(db))

        def request_of(row: Row[Any]) -> Request:
            keys = _candidates(row.candidates)
            if reserved:
                user = owner_of(row).user
                keys = tuple(k for k in keys if k not in reserved or reserved[k].user == user)
            return Request(row.id, keys, row.wanted)

        return keep(map(request_of, db.execute(_QUEUE)), free, states.keys() - free)

    def _keep_grant(self, db: Connection, key: str, token: int, grant: str) -> None:
        """Remember a grant, by which later claims know the holder that a device names."""
        of_device = select(grants.c.token).where(grants.c.key == key)
        newest = of_device.order_by(grants.c.token.desc()).limit(_FORMER)
        old = grants.c.key == key, grants.c.token.not_in(list(db.scalars(newest)))
        db.execute(grants.delete().where(*old))
        db.execute(grants.insert().values(key=key, token=token, nonce=grant))
        _update(db, key, token=token)

    def _insert_lease(
        self, db: Connection, key: str, token: int, grant: str, owner: Owner, purpose: str
    ) -> LeaseRow:
        until = self._clock.boottime() + self.ttl_s
        now, beat = self.database.times(db, self._clock)
        row = _device(db, key)
        token = token if row is None else max(token, row.token + 1)
        self._keep_grant(db, key, token, grant)
        lease = leases.insert().values(
            key=key, token=token, nonce=grant, purpose=purpose, granted=now, beat=beat,
            ttl=self.ttl_s, **columns_of(owner),
        )  # fmt: skip
        return lease_of(db.execute(lease.returning(leases)).one(), until)

    def _expire_dead_owners(self, db: Connection) -> None:
        """End the leases and tickets of dead processes, and repair contradictions."""
        beat, ended = self._beat(db), cache(self._has_ended)
        for row in db.execute(select(tickets)).all():
            if self._is_ahead(row, beat):
                db.execute(tickets.update().where(tickets.c.id == row.id).values(beat=beat))
            elif self._is_dead(row, beat, ended):
                db.execute(tickets.delete().where(tickets.c.id == row.id))
        for row in db.execute(select(leases)).all():
            if self._is_ahead(row, beat):
                db.execute(leases.update().where(leases.c.key == row.key).values(beat=beat))
            elif why := self._is_dead(row, beat, ended):
                self._take_lease(db, row, why)
        self._end_reserved(db)
        leased = select(leases.c.key)
        states = devices.c.state.in_([MemberState.LEASED, MemberState.PROBATION])
        for key in db.scalars(
            select(devices.c.key).where(states, devices.c.key.not_in(leased))
        ).all():
            self._apply(db, key, Event.EXPIRED, "it was held by nobody")
        db.execute(leases.delete().where(leases.c.key.not_in(select(devices.c.key))))

    def _reserved_from_holders(self, db: Connection) -> list[tuple[Row[Any], Reservation]]:
        """Return the leases of devices that are reserved now by other users than their holders."""
        reserved = current_reservations(db, self._now(db))
        if not reserved:
            return []
        states = devices.c.state.in_([MemberState.LEASED, MemberState.DRAINING])
        query = select(leases).join(devices, devices.c.key == leases.c.key).where(states)
        return [
            (row, reserved[row.key])
            for row in db.execute(query.where(leases.c.key.in_(tuple(reserved)))).all()
            if owner_of(row).user != reserved[row.key].user
        ]

    def _end_reserved(self, db: Connection) -> None:
        for lease, reservation in self._reserved_from_holders(db):
            self._take_lease(db, lease, f"it is {reservation.describe(self._now(db))}")

    def _take_lease(self, db: Connection, lease: Row[Any], why: str) -> None:
        """End a lease otherwise than by its holder's release."""
        db.execute(leases.delete().where(leases.c.key == lease.key))
        self._add_event(db, lease.key, _LOST, why, lease)
        self._end_lease(db, lease, Event.EXPIRED, why)

    def _is_ahead(self, row: Row[Any], beat: float) -> bool:
        """Return whether the server's clock was set back since a heartbeat."""
        return self.database.path is None and row.beat > beat

    def _is_dead(self, row: Row[Any], beat: float, ended: Callable[[Owner], bool]) -> str:
        """Return why the process of a lease or ticket has lost it; empty if it has not.

        Args:
            ended: looks at each process once: one may hold hundreds of devices.
        """
        owner = owner_of(row)
        if ended(owner):
            return f"{owner} is gone"
        # A beat from the future is of another boot whose id could not be read.
        is_of_this_boot = row.beat <= beat or self._is_ahead(row, beat)
        if is_of_this_boot and beat < row.beat + row.ttl:
            return ""
        return f"{owner} gave no sign of life for {row.ttl:g} s"


_QUEUE = select(tickets).where(tickets.c.grant.is_(None)).order_by(tickets.c.rank, tickets.c.id)


def _counter(db: Connection, name: str) -> int | None:
    return db.scalar(select(counters.c.value).where(counters.c.name == name))


def _set_counter(db: Connection, name: str, value: int) -> None:
    if not db.execute(
        counters.update().where(counters.c.name == name).values(value=value)
    ).rowcount:
        db.execute(counters.insert().values(name=name, value=value))


def _next_token(db: Connection) -> int:
    """Return a token that is higher than all before it."""
    token = (_counter(db, "token") or 0) + 1
    _set_counter(db, "token", token)
    return token


def _facts_changed(db: Connection) -> None:
    _set_counter(db, "facts", (_counter(db, "facts") or 0) + 1)


def _device(db: Connection, key: str) -> Row[Any] | None:
    return db.execute(select(devices).where(devices.c.key == key)).one_or_none()


def _state(db: Connection, key: str) -> MemberState:
    return MemberState(db.execute(select(devices.c.state).where(devices.c.key == key)).scalar_one())


def _update(db: Connection, key: str, **values: object) -> None:
    db.execute(devices.update().where(devices.c.key == key).values(**values))


def _reset_repairs(db: Connection, key: str) -> None:
    _update(db, key, due=0, attempts=0, step="")


def _lease(db: Connection, key: str, grant: str | None = None) -> Row[Any] | None:
    query = select(leases).where(leases.c.key == key)
    if grant is not None:
        query = query.where(leases.c.nonce == grant)
    return db.execute(query).one_or_none()


def _delete_lease(db: Connection, key: str, grant: str) -> bool:
    of_lease = leases.c.key == key, leases.c.nonce == grant
    return bool(db.execute(leases.delete().where(*of_lease)).rowcount)


def _loss(db: Connection, grant: str, key: str) -> Row[Any] | None:
    of_lease = history.c.key == key, history.c.what == _LOST, history.c.nonce == grant
    return db.execute(
        select(history).where(*of_lease).order_by(history.c.id.desc()).limit(1)
    ).one_or_none()


def _was_away(db: Connection, loss: Row[Any]) -> bool:
    """Return whether a device was known to be away before an entry of its history says so."""
    before = history.c.key == loss.key, history.c.id < loss.id, history.c.what.in_(_AWAY | _THERE)
    query = select(history.c.what).where(*before).order_by(history.c.id.desc()).limit(1)
    return db.scalar(query) in _AWAY


@lru_cache(maxsize=4096)
def _candidates(text: str) -> tuple[str, ...]:
    """Return the keys of devices in a ticket; `ValueError` if they are none."""
    keys = json.loads(text)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{text!r:.80} lists no devices")
    return tuple(keys)
