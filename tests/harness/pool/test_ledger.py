import contextlib
import itertools
import socket
import sqlite3
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection

from harness.clock import SystemClock
from harness.errors import LeaseLostError, LedgerError
from harness.pool.config import QuarantineConfig
from harness.pool.database import _LOCK, FORMAT, Database, _LostServerError
from harness.pool.failure_policy import FailureReport
from harness.pool.ledger import Ledger
from harness.pool.records import Facts, FenceRecord, devices
from harness.pool.states import Event
from tests.clock import ManualClock
from tests.conftest import NewPostgresqlServer
from tests.harness.pool.conftest import TTL_S, Bench, on_each_database, process
from tests.waiting import wait_for

LOST = FailureReport("DeviceLostError", 1.0, recover=True, text="it went away")
BAD_RUN = FailureReport("RunnerError", 1.0, recover=False, text="the runner crashed")


class _AskedFor(set[int]):
    """No dead processes; remembers of whom that was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: list[object] = []

    def __contains__(self, pid: object) -> bool:
        self.pids.append(pid)
        return False


def test_who_waits_looks_only_at_the_processes_in_its_way(bench: Bench) -> None:
    """Otherwise hundreds that wait look at hundreds, at each change of any."""
    bench.add("a", "b")
    bench.lease(1, "a")
    held = bench.lease(2, "b")
    tickets = [bench.ask(pid, "b") for pid in range(10, 60)]
    bench.dead = asked = _AskedFor()
    assert bench.ledger.try_grant(tickets[-1]) is None
    assert asked.pids == [2]  # the holder
    bench.ledger.release(held, ["b"])
    assert bench.ledger.try_grant(tickets[-1]) is None
    assert asked.pids == [2, 10]  # whose turn it is
    bench.dead = {10}
    assert bench.ledger.try_grant(tickets[-1]) is None
    assert bench.ledger.try_grant(tickets[1])


@on_each_database
def test_who_waits_leaves_time_to_those_before_it(bench: Bench) -> None:
    bench.add("a", "b", "c")
    bench.lease(1, "a", "b", "c")
    wanted = [["a"], ["b"], ["a"], ["a", "b"], ["c"], ["a"]]
    tickets = [bench.ask(pid, *keys) for pid, keys in enumerate(wanted, 2)]
    assert [bench.ledger.turns_before(ticket) for ticket in tickets] == [0, 0, 1, 1, 0, 3]
    assert bench.ledger.turns_before(tickets[-1] + 1) == 0  # nobody's


@on_each_database
def test_releases_wake_those_who_wait_and_heartbeats_do_not(bench: Bench) -> None:
    bench.add("a")
    held = bench.lease(1, "a")
    with closing(Database(bench.location)) as waiting:
        before = waiting.version()
        bench.ask(2, "a")
        bench.ledger.renew({held: 1})
        assert waiting.version() == before
        bench.ledger.release(held, ["a"])
        wait_for(lambda: waiting.version() != before)


def test_a_release_of_its_own_wakes_a_process_once(bench: Bench) -> None:
    bench.add("a")
    held = bench.lease(1, "a")
    with closing(Database(bench.location)) as other:
        for _ in range(2):  # the second heartbeat of another is a change of the file, too
            version = bench.database.version()
            other.write(lambda _: None, tell=False)
            assert bench.database.version() == version
            bench.ledger.release(held, ["a"])
            assert bench.database.version() != version


@on_each_database
def test_first_come_first_served_and_the_dead_keep_nothing(bench: Bench) -> None:
    bench.add("a")
    held = bench.lease(1, "a")
    tickets = [bench.ask(pid, "a") for pid in (2, 3, 4)]
    assert [bench.ledger.try_grant(t) for t in tickets] == [None] * 3
    bench.ledger.release(held, ["a"])
    assert bench.ledger.try_grant(tickets[2]) is None
    assert bench.ledger.try_grant(tickets[1]) is None
    rows = bench.ledger.try_grant(tickets[0])
    assert rows is not None
    assert rows[0].token > 1
    bench.dead |= {2, 3}  # the holder, and the next
    assert bench.ledger.try_grant(tickets[2])


def test_a_priority_goes_before_but_starves_nobody(bench: Bench) -> None:
    bench.add("a")
    held = bench.lease(1, "a")
    low = bench.ask(2, "a", priority=-1)
    bench.clock.time += 1
    high = bench.ask(3, "a", priority=1)
    bench.ledger.release(held, ["a"])
    assert bench.ledger.try_grant(low) is None
    rows = bench.ledger.try_grant(high)
    assert rows
    bench.ledger.settle(high)
    for _ in range(60):  # twenty minutes
        bench.clock.time += 20
        assert bench.ledger.try_grant(low) is None
        bench.ledger.renew({rows[0].grant: 1})
    late = bench.ask(4, "a", priority=1)
    bench.ledger.release(rows[0].grant, ["a"])
    assert bench.ledger.try_grant(late) is None
    assert bench.ledger.try_grant(low)


@on_each_database
def test_a_release_never_takes_what_a_new_owner_holds(bench: Bench) -> None:
    bench.add("a")
    old = bench.lease(1, "a")
    bench.clock.time += TTL_S + 1
    new = bench.lease(2, "a")
    assert bench.ledger.release(old, ["a"], unused=["a"]) == frozenset()
    assert bench.ledger.fence_of("a").quiet == ""
    assert bench.ledger.holds(new, "a")
    assert bench.ledger.report("a", old, LOST) is None
    assert bench.ledger.end_repair("a", old, Event.RECOVERED, "") is False


def test_a_lease_lasts_while_it_is_renewed_and_is_never_revived(bench: Bench) -> None:
    bench.add("a")
    token = bench.lease(1, "a")
    for _ in range(5):
        bench.clock.time += TTL_S - 1
        assert bench.ledger.renew({token: 1})[token] == bench.clock.time + TTL_S
    bench.clock.time += TTL_S
    # Nobody took it yet, but nobody may think that it still is leased: it is not revived.
    assert bench.ledger.renew({token: 1}) == {token: None}
    bench.ledger.reconcile()
    assert bench.state("a") == "ready"
    assert "no sign of life" in bench.reason("a")


@on_each_database
def test_a_ticket_expires_while_its_process_sleeps(bench: Bench) -> None:
    bench.add("a")
    bench.lease(1, "a")
    ticket = bench.ask(2, "a")
    bench.clock.time += TTL_S
    bench.ledger.reconcile()
    with pytest.raises(LeaseLostError):
        bench.ledger.try_grant(ticket)


@on_each_database
def test_a_ticket_whose_device_failed_goes_back_to_its_place(bench: Bench) -> None:
    bench.add("a")
    first, second = bench.ask(1, "a"), bench.ask(2, "a")
    rows = bench.ledger.try_grant(first) or []
    bench.ledger.release(rows[0].grant, ["a"])
    bench.ledger.put_back(first)
    assert bench.ledger.try_grant(second) is None
    assert bench.ledger.try_grant(first)
    bench.ledger.withdraw(first)
    assert [row.holder for row in bench.ledger.waiting()] == ["process 2"]


@pytest.mark.parametrize("bench", ["postgresql"], indirect=True)
def test_clock_of_a_server_that_is_set_back_keeps_no_device_of_the_dead(bench: Bench) -> None:
    bench.add("a", "b")
    dead, living = bench.lease(1, "a"), bench.lease(2, "b")
    ticket = bench.ask(3, "a")
    bench.clock.time -= 3600
    for _ in range(2):
        assert bench.ledger.try_grant(ticket) is None
        assert bench.ledger.renew({living: 1})[living]
        bench.clock.time += TTL_S / 2 + 1
    assert bench.ledger.try_grant(ticket)
    assert not bench.ledger.holds(dead, "a")
    assert bench.ledger.renew({living: 1})[living]


@on_each_database
def test_tokens_only_rise_also_above_that_of_a_device(bench: Bench) -> None:
    bench.add("a", "b")
    first = bench.lease(1, "a")
    assert bench.ledger.in_use(besides="b")
    assert not bench.ledger.in_use(besides="a")
    assert bench.ledger.pass_token("a", first, 5000, "it said so") == 5001
    assert bench.ledger.holds(first, "a")
    assert bench.ledger.pass_token("a", first, 7, "a lower one") is None
    assert bench.ledger.pass_token("a", first, 999_999_999, "beyond all grants") is None
    assert bench.ledger.pass_token("a", "0" * 16, 6000, "of another grant") is None
    bench.lease(2, "b")
    bench.ledger.release(first, ["a"])
    bench.lease(3, "a")
    tokens = {key: row.lease.token for key, row in bench.ledger.rows("ab").items() if row.lease}
    assert tokens == {"a": 5002, "b": 2}, "what one device says raises no token of another"


def test_a_drained_device_stays_with_its_holder_and_is_not_granted(bench: Bench) -> None:
    bench.add("a")
    token = bench.lease(1, "a")
    assert bench.ledger.apply("a", Event.DRAIN, "battery") == "draining"
    assert bench.ledger.holds(token, "a")
    assert bench.ledger.apply("a", Event.UNDRAIN, "") == "leased"
    bench.ledger.apply("a", Event.DRAIN, "battery")
    bench.ledger.release(token, ["a"])
    assert (bench.state("a"), bench.reason("a")) == ("draining", "battery")
    ticket = bench.ask(2, "a")
    assert bench.ledger.try_grant(ticket) is None
    bench.ledger.apply("a", Event.UNDRAIN, "")
    assert bench.ledger.try_grant(ticket)


@on_each_database
def test_a_failure_leads_to_recovery_after_the_release(bench: Bench) -> None:
    bench.add("a")
    token = bench.lease(1, "a")
    assert bench.ledger.report("a", token, LOST) == ""
    assert bench.state("a") == "leased"
    bench.ledger.release(token, ["a"])
    assert (bench.state("a"), bench.reason("a")) == ("recovering", "it went away")
    work = bench.begin_repair("a")
    assert work.purpose == "recovery"
    assert bench.ledger.begin_repair("a", process(3), force=True) is None
    bench.ledger.end_repair("a", work.grant, Event.RECOVERED, "it answers")
    assert bench.state("a") == "ready"


def test_recovery_backs_off_and_is_done_by_another_when_its_process_dies(bench: Bench) -> None:
    bench.add("a")
    bench.fail("a", LOST)
    bench.begin_repair("a")
    bench.dead.add(2)
    work = bench.begin_repair("a", 3)
    bench.ledger.end_repair("a", work.grant, Event.GAVE_UP, "dead", retry_in_s=100)
    assert bench.state("a") == "absent"
    assert bench.ledger.begin_repair("a", process(3)) is None
    bench.clock.set_by -= 365 * 86_400  # a wall clock that is set back puts off no repair
    assert "a" in bench.ledger.due_repairs()
    bench.clock.set_by = 101
    assert bench.ledger.begin_repair("a", process(3))


def test_quarantine_takes_failures_in_several_leases(bench: Bench) -> None:
    bench.add("a")
    token = bench.lease(1, "a")
    for _ in range(10):  # a lease that fails again and again is one bad lease
        bench.ledger.report("a", token, BAD_RUN)
    bench.ledger.release(token, ["a"])
    assert bench.state("a") == "ready"
    bench.fail("a", BAD_RUN)
    assert bench.state("a") == "ready"
    bench.fail("a", BAD_RUN)
    assert bench.state("a") == "quarantined"
    assert "RunnerError" in bench.reason("a")
    bench.ledger.apply("a", Event.DRAIN, "look at it")  # which does not end quarantine
    assert bench.ledger.apply("a", Event.UNDRAIN, "") == "quarantined"


def test_a_good_lease_ends_a_row_of_failures(bench: Bench) -> None:
    bench.add("a")
    for _ in range(6):
        bench.fail("a", BAD_RUN)
        bench.fail("a", BAD_RUN)
        bench.ledger.release(bench.lease(1, "a"), ["a"], unused=["a"])  # which says nothing
        bench.ledger.release(bench.lease(1, "a"), ["a"], used=["a"])
    assert bench.state("a") == "ready"


def test_quarantine_keeps_a_device_out_for_longer_each_time_it_returns(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.pool.history._MEMORY", 20)
    bench.add("a")
    for wait_s in (60, 120, 240):
        for _ in range(3):
            bench.fail("a", BAD_RUN)
        bench.clock.time += wait_s - 1
        assert bench.ledger.due_repairs() == []
        assert bench.ledger.begin_repair("a", process(2)) is None
        bench.clock.time += 2
        assert bench.ledger.due_repairs() == ["a"]
        bench.repair("a", Event.PASSED)
    for _ in range(20):  # it has been good for long
        bench.ledger.release(bench.lease(1, "a"), ["a"], used=["a"])
    for _ in range(3):
        bench.fail("a", BAD_RUN)
    bench.clock.time += 61
    assert bench.ledger.due_repairs() == ["a"]


def test_of_one_lease_only_the_heaviest_failure_counts(bench: Bench) -> None:
    bench.add("a")
    token = bench.lease(1, "a")
    for weight, text in ((1.0, "it hung"), (2.0, "a file came out as another"), (1.0, "again")):
        bench.ledger.report("a", token, FailureReport("X", weight, recover=False, text=text))
    bench.ledger.release(token, ["a"])
    (counted,) = bench.ledger.rows(["a"])["a"].failures
    assert (counted.weight, counted.text) == (2.0, "a file came out as another")


@on_each_database
def test_the_ledger_says_who_ended_a_lost_lease_and_when(bench: Bench) -> None:
    bench.add("a", "b")
    taken, slept = bench.lease(1, "a"), bench.lease(2, "b")
    bench.ledger.release(taken, ["a"], taken_by="ann: qnnfarm (pid 7)")
    again = bench.lease(3, "a")
    bench.clock.time += TTL_S + 1
    bench.ledger.reconcile()
    told = bench.ledger.why_lost(taken, ["a"])
    assert told.startswith("ann: qnnfarm (pid 7) took it back, at ")
    assert "no sign of life for 30 s, at " in bench.ledger.why_lost(slept, ["b"])
    assert "no sign of life" in bench.ledger.why_lost(again, ["a"])
    bench.ledger.release(ended := bench.lease(4, "a"), ["a"])
    assert bench.ledger.why_lost(ended, ["a"]) == ""
    refused = bench.lease(5, "a")
    for _ in range(2):
        bench.ledger.record_loss(refused, "a", "the device says so")
    losses = [entry for entry in bench.ledger.history("a") if entry.what == "lost its lease"]
    assert [entry.text for entry in losses[2:]] == ["token 5: the device says so"]


def test_a_probation_run_decides_and_earlier_failures_do_not_count(bench: Bench) -> None:
    bench.add("a")
    for _ in range(3):
        bench.fail("a", BAD_RUN)
    work = bench.begin_repair("a", force=True)
    assert (work.purpose, bench.state("a")) == ("probation", "probation")
    bench.ledger.end_repair("a", work.grant, Event.NOT_PASSED, "bad file", retry_in_s=60)
    assert bench.state("a") == "quarantined"
    assert bench.ledger.begin_repair("a", process(2)) is None
    bench.begin_repair("a", force=True)
    bench.dead.add(2)  # a killed one leads back, too
    bench.ledger.reconcile()
    assert bench.state("a") == "quarantined"
    bench.dead.clear()
    bench.repair("a", Event.PASSED, force=True)
    assert bench.state("a") == "ready"
    assert bench.ledger.rows(["a"])["a"].failures == ()
    for state in ("ready", "ready", "quarantined"):
        bench.fail("a", BAD_RUN)
        assert bench.state("a") == state


@on_each_database
def test_an_absent_device_gets_its_hardware_key_when_it_answers(bench: Bench) -> None:
    key = bench.ledger.record_absent("phone", "android:S1", "not there")
    assert bench.state(key) == "absent"
    version = bench.ledger.facts_version()
    bench.ledger.record_found("hardware:X", "phone", "android:S1", Facts("SM8750"))
    assert bench.ledger.facts_version() > version
    assert bench.state("hardware:X") == "ready"
    assert bench.ledger.keys_of(["android:S1", "android:S2"]) == {"android:S1": "hardware:X"}
    assert bench.ledger.rows([key]) == {}
    assert bench.ledger.record_absent("phone", "android:S1", "unplugged") == "hardware:X"
    assert (bench.state("hardware:X"), bench.reason("hardware:X")) == ("absent", "unplugged")
    bench.begin_repair("hardware:X", 7, force=True)
    last = bench.ledger.history("hardware:X")[-1]
    assert last.text.endswith("process 7 looks for it again")


@on_each_database
def test_a_device_keeps_its_space_its_fence_and_its_history(bench: Bench) -> None:
    bench.add("a")
    fence = FenceRecord("id", "/root", "3-abc")
    bench.ledger.set_fence("a", fence)
    bench.ledger.set_free_bytes("a", 5)
    bench.ledger.add_history("a", "what", "a text")
    bench.database.close()
    assert bench.ledger.fence_of("a") == fence
    assert bench.ledger.fence_of("b") == FenceRecord()
    assert bench.ledger.rows(["a"])["a"].facts.free_bytes == 5
    assert bench.ledger.history("a")[-1].text == "a text"
    assert bench.ledger.ledger_id() == bench.ledger.ledger_id()


@on_each_database
def test_contradictions_are_repaired(bench: Bench) -> None:
    bench.add("a", "b")
    bench.lease(1, "a")
    bench.sql("DELETE FROM pool_leases")
    bench.ledger.reconcile()
    assert (bench.state("a"), bench.reason("a")) == ("ready", "it was held by nobody")


def test_virtual_devices_of_two_users_of_a_server_are_two_devices(
    server_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("ann", "bob", "ann"):
        monkeypatch.setattr("harness.pool.ledger.user_name", lambda _, user=user: user)
        with closing(Database(server_location)) as database:
            ledger = Ledger(database, SystemClock(), ttl_s=30, rule=QuarantineConfig())
            ledger.record_found(f"hardware:of-{user}", "alpha", "virtual:alpha", Facts())
            ledger.record_found("hardware:R5", "phone", "android:R5", Facts())
            found = ledger.keys_of(["virtual:alpha", "android:R5"])
        expected = {"virtual:alpha": f"hardware:of-{user}", "android:R5": "hardware:R5"}
        assert found == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a database at all", "may be moved away"),
        (b"SQLite format 3\x00" + b"\xff" * 600, "may be moved away"),
        ("CREATE TABLE precious (x)", "some other database"),
        ("PRAGMA application_id = 1903060592; PRAGMA user_version = 7",
         r"an older qnnfarm wrote it \(format 7\); while"),
        (f"PRAGMA application_id = 1903060592; PRAGMA user_version = {FORMAT + 1}",
         "a newer qnnfarm wrote it"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_left_alone(
    tmp_path: Path, content: bytes | str, said: str
) -> None:
    path = tmp_path / "pool.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with closing(sqlite3.connect(path)) as other:
            other.executescript(content)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=said) as caught:
        Database(path).version()
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert path.read_bytes() == before


@pytest.mark.parametrize(("by", "said"), [(-1, "older qnnfarm"), (1, "newer qnnfarm")])
def test_a_ledger_of_another_format_on_a_server_is_left_alone(
    server_location: str, by: int, said: str
) -> None:
    bench = Bench(server_location)
    bench.add("a")
    bench.sql("UPDATE pool_counters SET value = value + :by WHERE name = 'format'", by=by)
    bench.database.close()
    with pytest.raises(LedgerError, match=said):
        bench.ledger.reconcile()
    bench.database.close()


@on_each_database
def test_a_recovery_step_is_stored_until_the_recovery_ends(bench: Bench) -> None:
    bench.add("a")
    bench.fail("a", LOST)

    def begun(pid: int, step: str) -> str:
        grant = bench.begin_repair("a", pid).grant
        bench.ledger.record_step("a", grant, step)
        return grant

    def known() -> tuple[str, str, int]:
        row = bench.ledger.rows(["a"])["a"]
        return str(row.state), row.step, row.attempts

    killed = begun(2, "reconnect")
    bench.dead.add(2)
    bench.ledger.reconcile()
    assert known() == ("recovering", "reconnect", 0)
    bench.ledger.record_step("a", killed, "reboot")  # it lost its lease with its life
    assert known() == ("recovering", "reconnect", 0)
    bench.ledger.interrupt_repair("a", begun(3, "reboot"))
    assert known() == ("recovering", "reboot", 0)
    bench.ledger.interrupt_repair("a", killed)
    grant = begun(4, "power_cycle")
    assert bench.ledger.end_repair("a", grant, Event.GAVE_UP, "no use", retry_in_s=50)
    assert known() == ("absent", "", 1)
    bench.clock.time += 50
    begun(5, "reconnect")
    bench.dead.add(5)
    bench.ledger.reconcile()
    assert known() == ("recovering", "reconnect", 1)
    bench.ledger.apply("a", Event.RECOVER, "recovery was asked for")
    assert known() == ("recovering", "", 0)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError):
        Database(tmp_path / "file" / "pool.db").version()


@on_each_database
def test_a_transaction_that_fails_changes_nothing(bench: Bench) -> None:
    bench.add("a")

    def fail(db: Connection) -> None:
        db.execute(devices.delete())
        raise RuntimeError

    with pytest.raises(RuntimeError):
        bench.database.write(fail)
    assert bench.state("a") == "ready"


@pytest.mark.parametrize("end", ["killed", "asleep"])
def test_what_a_holder_reported_counts_if_it_dies_before_the_release(
    bench: Bench, end: str
) -> None:
    def die(pid: int) -> None:
        if end == "killed":
            bench.dead.add(pid)
        bench.clock.time += TTL_S
        bench.ledger.reconcile()

    bench.add("a", "b")
    token = bench.lease(1, "a")
    bench.ledger.report("a", token, LOST)
    die(1)
    assert (bench.state("a"), bench.reason("a")) == ("recovering", "it went away")
    assert "a" in bench.ledger.due_repairs()
    for pid in (2, 3, 4):
        token = bench.lease(pid, "b")
        bench.ledger.report("b", token, BAD_RUN)
        die(pid)
    assert bench.state("b") == "quarantined"


def test_a_device_over_the_limit_is_quarantined_when_it_comes_back(bench: Bench) -> None:
    bench.add("a")
    for report in (BAD_RUN, BAD_RUN, LOST):
        bench.fail("a", report)
    bench.repair("a", Event.GAVE_UP)
    assert bench.state("a") == "absent"
    bench.add("a")  # it was plugged in again, and found
    assert bench.state("a") == "quarantined"


@pytest.mark.parametrize(
    ("report", "end", "state"),
    [(BAD_RUN, Event.NOT_PASSED, "quarantined"), (LOST, Event.GAVE_UP, "absent")],
)
def test_a_drain_that_is_taken_back_during_a_repair_does_not_make_the_device_ready(
    bench: Bench, report: FailureReport, end: Event, state: str
) -> None:
    bench.add("a")
    for each in (BAD_RUN, BAD_RUN, report):
        bench.fail("a", each)
    work = bench.begin_repair("a", force=True)
    bench.ledger.apply("a", Event.DRAIN, "a look")
    bench.ledger.apply("a", Event.UNDRAIN, "")
    bench.ledger.end_repair("a", work.grant, end, "no better", retry_in_s=60)
    bench.ledger.reconcile()
    assert bench.state("a") == state


@on_each_database
def test_the_longest_overdue_repair_comes_first(bench: Bench) -> None:
    names = [f"d{n:02}" for n in range(4)]
    bench.add(*names)
    for name in names:
        bench.fail(name, LOST)
    order = names[3:] + names[:3]
    for name in order:
        bench.repair(name, Event.GAVE_UP, retry_in_s=10)
        bench.clock.time += 1
    bench.clock.time += 100
    assert list(bench.ledger.due_repairs()) == order


def test_a_host_that_slept_while_it_waited_for_others_to_write_asks_again(
    server_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    time = SimpleNamespace(monotonic=clock.boottime)
    monkeypatch.setattr("harness.pool.database.time", time)
    with (
        closing(Database(server_location)) as writer,
        closing(Database(server_location)) as other,
        other._engine.connect() as holder,
    ):
        holder.exec_driver_sql(f"SELECT pg_advisory_lock({_LOCK})")
        transact, tries = writer._transact, []

        def transact_late(work: Callable[[Connection], str], *, writes: bool) -> str:
            tries.append(clock.time)
            try:
                return transact(work, writes=writes)
            finally:
                clock.time += 40
                if len(tries) == 1:
                    holder.exec_driver_sql(f"SELECT pg_advisory_unlock({_LOCK})")

        monkeypatch.setattr(writer, "_transact", transact_late)
        assert writer.write(lambda _: "written") == "written"
        assert len(tries) == 2


def test_a_process_that_was_stopped_waits_for_a_server_as_long_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, tries = ManualClock(), itertools.count(1)
    own_time = SimpleNamespace(monotonic=clock.boottime, sleep=clock.sleep)
    monkeypatch.setattr("harness.pool.database.time", own_time)

    def transact(*_: object, **__: object) -> str:
        number = next(tries)
        if number == 2:
            clock.time += 3600  # it was stopped
        if number != 50:
            raise _LostServerError("the server is starting")
        return "read"

    with closing(Database("postgresql+psycopg://ann@127.0.0.1:1/lab")) as database:
        monkeypatch.setattr(database, "_transact", transact)
        database._was_there = True
        assert database.read(str) == "read"
        with pytest.raises(LedgerError, match="the server is starting"):
            database.read(str)


def test_process_that_begins_while_the_server_restarts_waits_for_it(
    new_postgresql_server: NewPostgresqlServer,
) -> None:
    with new_postgresql_server() as server, ThreadPoolExecutor(1) as threads:
        server.stop()
        with closing(Database(server.url("postgres"))) as database:
            answer = threads.submit(database.read, str)
            time.sleep(0.5)
            assert not answer.done()
            server.start()
            assert answer.result(60)


@pytest.mark.parametrize("state", ["starting up", "closed the connection"])  # as it went away
def test_a_server_that_will_be_there_is_waited_for(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries = ManualClock(), itertools.count()
    own_time = SimpleNamespace(monotonic=clock.boottime, sleep=lambda _: clock.sleep(5))
    monkeypatch.setattr("harness.pool.database.time", own_time)
    fields = f"SFATAL\0VFATAL\0C57P03\0Mthe database system is {state}\0\0".encode()
    answer = b"E" + struct.pack("!I", len(fields) + 4) + fields
    is_cut = state == "closed the connection"

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listening.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(b"" if is_cut else answer)
                    next(tries)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        threads.submit(serve, listening)
        options = "sslmode=disable&gssencmode=disable"
        url = f"postgresql://ann@127.0.0.1:{listening.getsockname()[1]}/lab?{options}"
        with closing(Database(url)) as database, pytest.raises(LedgerError, match=state):
            database.read(str)
        listening.shutdown(socket.SHUT_RDWR)
    assert next(tries) > 1
