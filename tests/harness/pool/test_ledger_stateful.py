"""No device has two holders, and each request its turn, whatever processes do, die or sleep."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from harness.errors import LeaseLostError
from harness.pool.failure_policy import FailureReport, Work
from harness.pool.queue import Request, keep, served
from harness.pool.records import LeaseRow
from harness.pool.states import Event, MemberState
from tests.harness.pool.conftest import TTL_S, Bench, process

_KEYS = ("a", "b", "c")
_keys = st.sampled_from(_KEYS)
_pids = st.integers(1, 9)
_BAD = FailureReport("RunnerError", 1.0, recover=False, text="crashed")
_LOST = FailureReport("DeviceLostError", 1.0, recover=True, text="went away")


@dataclass
class Believed:
    """A lease as its holder sees it, by its own clock alone."""

    grant: str
    pid: int
    keys: set[str]
    until: float
    work: bool = False


@dataclass
class Waiting:
    pid: int
    candidates: tuple[str, ...]
    count: int
    until: float
    latest: float


@dataclass
class Model:
    leases: list[Believed] = field(default_factory=list)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    highest: int = 0


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.bench = Bench(Path(self.folder.name) / "pool.db")
        self.bench.add(*_KEYS)
        self.model = Model()
        self.next_pid = 100

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.database.close()
            self.folder.cleanup()

    def alive(self, pid: int) -> bool:
        return pid not in self.bench.dead

    def believers(self, key: str) -> list[Believed]:
        now = self.bench.clock.time
        return [
            lease
            for lease in self.model.leases
            if key in lease.keys and lease.until > now and self.alive(lease.pid)
        ]

    def granted(self, rows: list[LeaseRow], pid: int, *, work: bool = False) -> None:
        for row in rows:
            assert not self.believers(row.key), "two holders"
        assert {row.token for row in rows} == {rows[0].token}
        assert rows[0].token > self.model.highest, "tokens must rise"
        self.model.highest = rows[0].token
        until = rows[0].until
        self.model.leases.append(
            Believed(rows[0].grant, pid, {row.key for row in rows}, until, work)
        )

    @rule(pid=_pids, wanted=st.sets(_keys, min_size=1), count=st.integers(1, 3))
    def ask(self, pid: int, wanted: set[str], count: int) -> None:
        if self.alive(pid):
            count = min(count, len(wanted))
            keys = tuple(sorted(wanted))
            self.bench.clock.time += 1
            ticket = self.bench.ledger.enqueue(process(pid), keys, count)
            until = self.bench.clock.time + TTL_S
            self.model.waiting[ticket] = Waiting(pid, keys, count, until, until)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.model.waiting)))
        asked = self.model.waiting[ticket]
        if not self.alive(asked.pid):
            return
        places = self.places()
        turn = self.turn(ticket, places)
        try:
            rows = self.bench.ledger.try_grant(ticket)
        except LeaseLostError:
            assert ticket not in places
            assert self.bench.clock.time >= asked.until
            del self.model.waiting[ticket]
            return
        asked.latest = self.bench.clock.time + TTL_S
        asked.until = asked.latest - TTL_S / 4  # its place may be kept a little later
        assert [row.key for row in rows or ()] == list(turn)
        if rows:
            self.granted(rows, asked.pid)
            self.bench.ledger.settle(ticket)
            del self.model.waiting[ticket]

    def places(self) -> set[int]:
        """The tickets that the ledger has."""
        self.bench.ledger.reconcile()
        places = {row.id for row in self.bench.sql("SELECT id FROM pool_tickets")}
        for ticket in places:
            asked = self.model.waiting[ticket]
            assert self.alive(asked.pid)
            assert self.bench.clock.time < asked.latest
        return places

    def turn(self, ticket: int, places: set[int]) -> Sequence[str]:
        """The devices that it is a ticket's turn to get, all or none, in the order of the queue."""
        queue = [
            Request(number, asked.candidates, asked.count)
            for number, asked in sorted(self.model.waiting.items())
            if number in places
        ]
        states = {key: row.state for key, row in self.bench.ledger.rows(_KEYS).items()}
        free, in_use = (
            {key for key, state in states.items() if state is wanted}
            for wanted in (MemberState.READY, MemberState.LEASED)
        )
        return served(keep(queue, free, in_use)).get(ticket, ())

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.model.leases))
        others = {key: [b.grant for b in self.believers(key)] for key in _KEYS}
        keys = sorted(lease.keys)
        self.bench.ledger.release(lease.grant, keys, used=keys)
        self.model.leases.remove(lease)
        for key, grants in others.items():
            for grant in grants:
                if grant != lease.grant:
                    assert self.bench.ledger.holds(grant, key), "it took another's"

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.model.leases))
        if not self.alive(lease.pid):
            return
        until = self.bench.ledger.renew({lease.grant: len(lease.keys)})[lease.grant]
        if until is None:
            assert lease.until <= self.bench.clock.time
            self.model.leases.remove(lease)
        else:
            lease.until = until

    @precondition(lambda self: self.model.leases)
    @rule(
        data=st.data(),
        judgement=st.sampled_from([_BAD, _LOST]),
        work=st.sampled_from(["", "cell-1", "cell-2"]),
        answered=st.booleans(),
    )
    def report(
        self, data: st.DataObject, judgement: FailureReport, work: str, answered: bool
    ) -> None:
        lease = data.draw(st.sampled_from(self.model.leases))
        report = replace(
            judgement,
            work=Work(work, work, self.bench.clock.now()) if work else None,
            answered="it answered" if answered else "",
        )
        for key in lease.keys:
            self.bench.ledger.report(key, lease.grant, report)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), work=st.sampled_from(["cell-1", "cell-2"]))
    def succeed(self, data: st.DataObject, work: str) -> None:
        lease = data.draw(st.sampled_from(self.model.leases))
        self.bench.ledger.report_success(lease.grant, Work(work, work, 0.0))

    @rule(key=_keys, pid=_pids, force=st.booleans())
    def begin_work(self, key: str, pid: int, force: bool) -> None:
        if self.alive(pid):
            row = self.bench.ledger.begin_repair(key, process(pid), force=force)
            if row is not None:
                self.granted([row], pid, work=True)

    @precondition(lambda self: any(lease.work for lease in self.model.leases))
    @rule(data=st.data(), good=st.booleans())
    def end_work(self, data: st.DataObject, good: bool) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.model.leases if lease.work]))
        (key,) = lease.keys
        probation = self.bench.state(key) == "probation"
        good_event, bad_event = (
            (Event.PASSED, Event.NOT_PASSED) if probation else (Event.RECOVERED, Event.GAVE_UP)
        )
        self.bench.ledger.end_repair(
            key, lease.grant, good_event if good else bad_event, "it ended", retry_in_s=50
        )
        self.model.leases.remove(lease)

    @rule(key=_keys)
    def drain(self, key: str) -> None:
        self.bench.ledger.apply(key, Event.DRAIN, "a wish")

    @rule(key=_keys)
    def undrain(self, key: str) -> None:
        if self.bench.state(key) == "draining":
            self.bench.ledger.apply(key, Event.UNDRAIN, "a wish")

    @rule(seconds=st.sampled_from([1.0, 10.0, TTL_S - 1, TTL_S, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.clock.time += seconds

    @rule(pid=_pids)
    def die(self, pid: int) -> None:
        self.bench.dead.add(pid)

    @invariant()
    def everything_is_whole(self) -> None:
        if not hasattr(self, "bench"):
            return
        for key, row in self.bench.ledger.rows(_KEYS).items():
            assert row.reason
            assert len(self.believers(key)) <= 1
            for lease in self.believers(key):
                assert self.bench.ledger.holds(lease.grant, key)
            if row.state is MemberState.LEASED:
                assert row.lease is not None
            if row.state in {MemberState.READY, MemberState.QUARANTINED, MemberState.ABSENT}:
                assert row.lease is None


LedgerMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
