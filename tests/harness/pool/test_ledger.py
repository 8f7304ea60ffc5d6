import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import DamagedLedgerError, LeaseLostError, LedgerError, NewerLedgerError
from harness.pool.database import FORMAT, Database
from harness.pool.failure_policy import FailureReport
from harness.pool.records import Facts, FenceRecord
from harness.pool.states import Event
from tests.harness.pool.conftest import TTL_S, Bench, process
from tests.harness.pool.old_formats import downgrade

Grab = Callable[..., int]
LOST = FailureReport("DeviceLostError", 1.0, recover=True, text="it went away")
BAD_RUN = FailureReport("RunnerError", 1.0, recover=False, text="the runner crashed")


def test_first_come_first_served(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    held = grab(1, "a")
    tickets = [bench.ledger.tickets.enqueue(process(pid), ["a"], 1) for pid in (2, 3, 4)]
    assert [bench.ledger.tickets.try_grant(t, process(9)) for t in tickets] == [None] * 3
    bench.ledger.leases.release(held, ["a"])
    assert bench.ledger.tickets.try_grant(tickets[2], process(4)) is None
    assert bench.ledger.tickets.try_grant(tickets[1], process(3)) is None
    rows = bench.ledger.tickets.try_grant(tickets[0], process(2))
    assert rows is not None
    assert rows[0].token > held


def test_several_devices_come_together_under_one_token(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b", "c")
    held = grab(1, "c")
    ticket = bench.ledger.tickets.enqueue(process(2), ["a", "b", "c"], 3)
    assert bench.ledger.tickets.try_grant(ticket, process(2)) is None
    assert bench.state("a") == "ready"
    bench.ledger.leases.release(held, ["c"])
    rows = bench.ledger.tickets.try_grant(ticket, process(2)) or []
    assert sorted(row.key for row in rows) == ["a", "b", "c"]
    assert len({row.token for row in rows}) == 1


def test_a_stream_of_small_requests_does_not_starve_a_big_one(bench: Bench) -> None:
    bench.add("a", "b", "c")
    keys = ["a", "b", "c"]
    waiting = [
        (bench.ledger.tickets.enqueue(process(n), keys, 1), process(n)) for n in range(10, 13)
    ]
    running = []
    for ticket, owner in waiting:
        rows = bench.ledger.tickets.try_grant(ticket, owner)
        assert rows
        bench.ledger.tickets.settle(ticket)
        running.append(rows[0])
    big = bench.ledger.tickets.enqueue(process(1), keys, 3)
    small = [(bench.ledger.tickets.enqueue(process(n), keys, 1), process(n)) for n in range(20, 40)]
    for row in running:
        bench.ledger.leases.release(row.token, [row.key])
        for ticket, owner in small:
            assert bench.ledger.tickets.try_grant(ticket, owner) is None
    assert len(bench.ledger.tickets.try_grant(big, process(1)) or []) == 3


def test_a_release_never_takes_what_a_new_owner_holds(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    old = grab(1, "a")
    bench.clock.time += TTL_S + 1
    new = grab(2, "a")
    assert bench.ledger.leases.release(old, ["a"]) == frozenset()
    assert bench.ledger.leases.holds(new, "a")
    assert bench.ledger.leases.report("a", old, LOST) is None
    assert bench.ledger.repairs.end("a", old, Event.RECOVERED, "") is False


def test_a_lease_lasts_while_it_is_renewed_and_is_never_revived(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    token = grab(1, "a")
    for _ in range(5):
        bench.clock.time += TTL_S - 1
        assert bench.ledger.leases.renew({token: 1})[token] == bench.clock.time + TTL_S
    bench.clock.time += TTL_S
    # Nobody took it yet, but nobody may think that it still is leased: it is not revived.
    assert bench.ledger.leases.renew({token: 1}) == {token: None}
    bench.ledger.reconcile()
    assert bench.state("a") == "ready"
    assert "no sign of life" in bench.reason("a")


def test_the_device_of_a_killed_holder_is_free_at_once(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    grab(1, "a")
    ticket = bench.ledger.tickets.enqueue(process(2), ["a"], 1)
    assert bench.ledger.tickets.try_grant(ticket, process(2)) is None
    bench.dead.add(1)
    assert bench.ledger.tickets.try_grant(ticket, process(2))


def test_a_dead_process_keeps_no_place_in_the_queue(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    held = grab(1, "a")
    bench.ledger.tickets.enqueue(process(2), ["a"], 1)
    ticket = bench.ledger.tickets.enqueue(process(3), ["a"], 1)
    bench.dead.add(2)
    bench.ledger.leases.release(held, ["a"])
    assert bench.ledger.tickets.try_grant(ticket, process(3))


def test_a_ticket_expires_while_its_process_sleeps(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    grab(1, "a")
    ticket = bench.ledger.tickets.enqueue(process(2), ["a"], 1)
    bench.clock.time += TTL_S
    bench.ledger.reconcile()
    with pytest.raises(LeaseLostError):
        bench.ledger.tickets.try_grant(ticket, process(2))


def test_a_ticket_whose_device_failed_goes_back_to_its_place(bench: Bench) -> None:
    bench.add("a")
    first = bench.ledger.tickets.enqueue(process(1), ["a"], 1)
    second = bench.ledger.tickets.enqueue(process(2), ["a"], 1)
    rows = bench.ledger.tickets.try_grant(first, process(1)) or []
    bench.ledger.leases.release(rows[0].token, ["a"])
    bench.ledger.tickets.put_back(first)
    assert bench.ledger.tickets.try_grant(second, process(2)) is None
    assert bench.ledger.tickets.try_grant(first, process(1))


def test_tokens_only_rise_also_above_that_of_a_device(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    first = grab(1, "a")
    bench.ledger.devices.note_token(5000)
    bench.ledger.devices.note_token(7)
    assert bench.ledger.leases.holds(first, "a")
    assert grab(2, "b") == 5001


def test_a_drained_device_stays_with_its_holder_and_is_not_granted(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a")
    token = grab(1, "a")
    assert bench.ledger.devices.apply("a", Event.DRAIN, "battery") == "draining"
    assert bench.ledger.leases.holds(token, "a")
    assert bench.ledger.devices.apply("a", Event.UNDRAIN, "") == "leased"
    bench.ledger.devices.apply("a", Event.DRAIN, "battery")
    bench.ledger.leases.release(token, ["a"])
    assert (bench.state("a"), bench.reason("a")) == ("draining", "battery")
    ticket = bench.ledger.tickets.enqueue(process(2), ["a"], 1)
    assert bench.ledger.tickets.try_grant(ticket, process(2)) is None
    bench.ledger.devices.apply("a", Event.UNDRAIN, "")
    assert bench.ledger.tickets.try_grant(ticket, process(2))


def test_a_failure_leads_to_recovery_after_the_release(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    token = grab(1, "a")
    assert bench.ledger.leases.report("a", token, LOST)
    assert bench.state("a") == "leased"
    bench.ledger.leases.release(token, ["a"])
    assert (bench.state("a"), bench.reason("a")) == ("recovering", "it went away")
    work = bench.ledger.repairs.begin("a", process(2))
    assert work is not None
    assert work.purpose == "recovery"
    assert bench.ledger.repairs.begin("a", process(3), force=True) is None
    bench.ledger.repairs.end("a", work.token, Event.RECOVERED, "it answers")
    assert bench.state("a") == "ready"


def test_recovery_backs_off_and_is_done_by_another_when_its_process_dies(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a")
    token = grab(1, "a")
    bench.ledger.leases.report("a", token, LOST)
    bench.ledger.leases.release(token, ["a"])
    assert bench.ledger.repairs.begin("a", process(2))
    bench.dead.add(2)
    work = bench.ledger.repairs.begin("a", process(3))
    assert work is not None
    bench.ledger.repairs.end("a", work.token, Event.GAVE_UP, "dead", retry_in_s=100)
    assert bench.state("a") == "absent"
    assert bench.ledger.repairs.begin("a", process(3)) is None
    bench.clock.time += 101
    assert bench.ledger.repairs.begin("a", process(3))


def _fail(bench: Bench, grab: Grab, judgement: FailureReport = BAD_RUN) -> None:
    token = grab(1, "a")
    bench.ledger.leases.report("a", token, judgement)
    bench.ledger.leases.release(token, ["a"])


def test_quarantine_takes_failures_in_several_leases(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    token = grab(1, "a")
    for _ in range(10):  # a lease that fails again and again is one bad lease
        bench.ledger.leases.report("a", token, BAD_RUN)
    bench.ledger.leases.release(token, ["a"])
    assert bench.state("a") == "ready"
    _fail(bench, grab)
    assert bench.state("a") == "ready"
    _fail(bench, grab)
    assert bench.state("a") == "quarantined"
    assert "RunnerError" in bench.reason("a")


def test_old_failures_leave_the_window(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    for _ in range(6):
        _fail(bench, grab)
        for _ in range(5):
            bench.ledger.leases.release(grab(1, "a"), ["a"])
    assert bench.state("a") == "ready"


def test_quarantine_keeps_a_device_out_for_longer_each_time_it_returns(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a")
    for wait_s in (60, 120, 240):
        for _ in range(3):
            _fail(bench, grab)
        bench.clock.time += wait_s - 1
        assert bench.ledger.repairs.due() == []
        assert bench.ledger.repairs.begin("a", process(2)) is None
        bench.clock.time += 2
        assert bench.ledger.repairs.due() == ["a"]
        work = bench.ledger.repairs.begin("a", process(2))
        assert work is not None
        bench.ledger.repairs.end("a", work.token, Event.PASSED, "passed")
    for _ in range(bench.rule.memory + 1):  # it has been good for long
        bench.ledger.leases.release(grab(1, "a"), ["a"])
    for _ in range(3):
        _fail(bench, grab)
    bench.clock.time += 61
    assert bench.ledger.repairs.due() == ["a"]


def test_of_one_lease_only_the_heaviest_failure_counts(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    token = grab(1, "a")
    for weight, text in ((1.0, "it hung"), (2.0, "a file came out as another"), (1.0, "again")):
        bench.ledger.leases.report("a", token, FailureReport("X", weight, recover=False, text=text))
    bench.ledger.leases.release(token, ["a"])
    (counted,) = bench.ledger.devices.rows(["a"])["a"].failures
    assert (counted.weight, counted.text) == (2.0, "a file came out as another")


def test_the_ledger_says_who_ended_a_lost_lease_and_when(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    taken, slept = grab(1, "a"), grab(2, "b")
    bench.ledger.leases.release(taken, ["a"], taken_by="ann: qnnfarm (pid 7)")
    again = grab(3, "a")
    bench.clock.time += TTL_S + 1
    bench.ledger.reconcile()
    told = bench.ledger.leases.why_lost(taken, ["a"])
    assert told.startswith("ann: qnnfarm (pid 7) took it back, at ")
    assert "no sign of life for 30 s, at " in bench.ledger.leases.why_lost(slept, ["b"])
    assert "no sign of life" in bench.ledger.leases.why_lost(again, ["a"])
    bench.ledger.leases.release(ended := grab(4, "a"), ["a"])
    assert bench.ledger.leases.why_lost(ended, ["a"]) == ""


def test_failures_before_a_passed_probation_do_not_count(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    for _ in range(3):
        _fail(bench, grab)
    work = bench.ledger.repairs.begin("a", process(2), force=True)
    assert work is not None
    assert (work.purpose, bench.state("a")) == ("probation", "probation")
    bench.ledger.repairs.end("a", work.token, Event.PASSED, "passed")
    assert bench.state("a") == "ready"
    assert bench.ledger.devices.rows(["a"])["a"].failures == ()
    _fail(bench, grab)
    _fail(bench, grab)
    assert bench.state("a") == "ready"
    _fail(bench, grab)
    assert bench.state("a") == "quarantined"


def test_draining_does_not_end_quarantine(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    for _ in range(3):
        _fail(bench, grab)
    bench.ledger.devices.apply("a", Event.DRAIN, "look at it")
    assert bench.ledger.devices.apply("a", Event.UNDRAIN, "") == "quarantined"


def test_a_failed_probation_and_a_killed_one_lead_back_to_quarantine(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a")
    for _ in range(3):
        _fail(bench, grab)
    work = bench.ledger.repairs.begin("a", process(2), force=True)
    assert work is not None
    bench.ledger.repairs.end("a", work.token, Event.NOT_PASSED, "bad file", retry_in_s=60)
    assert bench.state("a") == "quarantined"
    assert bench.ledger.repairs.begin("a", process(2)) is None
    assert bench.ledger.repairs.begin("a", process(2), force=True)
    bench.dead.add(2)
    bench.ledger.reconcile()
    assert bench.state("a") == "quarantined"


def test_failures_that_say_nothing_about_the_device_do_not_count(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    for _ in range(10):
        _fail(bench, grab, FailureReport("AdbServerError", 0.0, recover=False, text="server died"))
    assert bench.state("a") == "ready"


def test_an_absent_device_gets_its_hardware_key_when_it_answers(bench: Bench) -> None:
    key = bench.ledger.devices.record_absent("phone", "android:S1", "not there")
    assert bench.state(key) == "absent"
    bench.ledger.devices.record_found("hardware:X", "phone", "android:S1", Facts("SM8750"))
    assert bench.state("hardware:X") == "ready"
    assert bench.ledger.devices.rows([key]) == {}
    assert bench.ledger.devices.record_absent("phone", "android:S1", "unplugged") == "hardware:X"
    assert (bench.state("hardware:X"), bench.reason("hardware:X")) == ("absent", "unplugged")


def test_contradictions_are_repaired(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    grab(1, "a")
    with bench.database.writing() as db:
        db.execute("DELETE FROM leases")
    bench.ledger.reconcile()
    assert (bench.state("a"), bench.reason("a")) == ("ready", "it was held by nobody")


@pytest.mark.parametrize(
    "content", [b"not a database at all", b"SQLite format 3\x00" + b"\xff" * 600]
)
def test_a_damaged_ledger_is_reported_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pool.db"
    path.write_bytes(content)
    with pytest.raises(DamagedLedgerError) as caught:
        Database(path).version()
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert path.read_bytes() == content


def test_another_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE precious (x)")
    other.commit()
    other.close()
    before = path.read_bytes()
    with pytest.raises(DamagedLedgerError, match="some other database"):
        Database(path).version()
    assert path.read_bytes() == before


def test_a_newer_ledger_is_left_alone(bench: Bench) -> None:
    bench.add("a")
    with bench.database.writing() as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    bench.database.close()
    with pytest.raises(NewerLedgerError, match="newer qnnfarm"):
        bench.ledger.reconcile()


def test_a_ledger_of_the_first_format_is_brought_up_to_date(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    token = grab(1, "a")
    with bench.database.writing() as db:
        downgrade(db, 1)
        db.execute("UPDATE devices SET fence = 'known'")
    bench.database.close()
    assert bench.ledger.devices.fence_of("a") == FenceRecord("known")
    assert bench.ledger.devices.facts_version() == 0
    bench.ledger.devices.set_free_bytes("a", 1)
    assert bench.ledger.devices.facts_version() == 1
    assert bench.ledger.leases.release(token, ["a"], unused=["a"]) == {"a"}
    assert bench.ledger.devices.fence_of("a").quiet == token
    assert bench.ledger.devices.rows(["a"])["a"].step == ""


def test_a_ledger_of_the_third_format_keeps_why_leases_were_lost(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    token = grab(1, "a")
    bench.ledger.leases.release(token, ["a"], taken_by="ann: qnnfarm: x (pid 7)")
    bench.ledger.devices.record_absent("c", "c", "not looked at yet", probed=False)
    before = bench.ledger.devices.history("a")
    assert before[-2].text == f"token {token}: ann: qnnfarm: x (pid 7) took it back"
    with bench.database.writing() as db:
        downgrade(db, 3)
        (stored,) = db.execute("SELECT text FROM history WHERE what LIKE 'lost%'").fetchone()
        assert stored == before[-2].text
    bench.database.close()
    assert bench.ledger.devices.history("a") == before
    told = bench.ledger.leases.why_lost(token, ["a"])
    assert told.startswith("ann: qnnfarm: x (pid 7) took it back, at ")
    rows = bench.ledger.devices.rows("abc")
    assert {key: row.probed for key, row in rows.items()} == {"a": True, "b": True, "c": False}


def test_a_recovery_step_is_stored_until_the_recovery_ends(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    token, lost = grab(1, "a"), FailureReport("DeviceLostError", 1.0, recover=True, text="away")
    bench.ledger.leases.report("a", token, lost)
    bench.ledger.leases.release(token, ["a"])

    def begun(pid: int, step: str) -> int:
        row = bench.ledger.repairs.begin("a", process(pid))
        assert row is not None
        bench.ledger.repairs.record_step("a", row.token, step)
        return row.token

    def known() -> tuple[str, str, int]:
        row = bench.ledger.devices.rows(["a"])["a"]
        return str(row.state), row.step, row.attempts

    killed = begun(2, "reconnect")
    bench.dead.add(2)
    bench.ledger.reconcile()
    assert known() == ("recovering", "reconnect", 0)
    bench.ledger.repairs.record_step("a", killed, "reboot")  # it lost its lease with its life
    assert known() == ("recovering", "reconnect", 0)
    bench.ledger.repairs.interrupt("a", begun(3, "reboot"))
    assert known() == ("recovering", "reboot", 0)
    bench.ledger.repairs.interrupt("a", killed)
    token = begun(4, "power_cycle")
    assert bench.ledger.repairs.end("a", token, Event.GAVE_UP, "no use", retry_in_s=50)
    assert known() == ("absent", "", 1)
    bench.clock.time += 50
    begun(5, "reconnect")
    bench.dead.add(5)
    bench.ledger.reconcile()
    assert known() == ("recovering", "reconnect", 1)
    bench.ledger.devices.apply("a", Event.RECOVER, "recovery was asked for")
    assert known() == ("recovering", "", 0)


def test_a_late_release_marks_no_lease_as_quiet(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    late = grab(1, "a")
    bench.ledger.leases.release(late, ["a"])
    grab(2, "a")
    bench.ledger.leases.release(late, ["a"], unused=["a"])
    assert bench.ledger.devices.fence_of("a").quiet == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError):
        Database(tmp_path / "file" / "pool.db").version()


def test_a_transaction_that_fails_changes_nothing(bench: Bench) -> None:
    bench.add("a")

    def fail() -> None:
        with bench.database.writing() as db:
            db.execute("DELETE FROM devices")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert bench.state("a") == "ready"


@pytest.mark.parametrize("end", ["killed", "asleep"])
def test_what_a_holder_reported_counts_if_it_dies_before_the_release(
    bench: Bench, grab: Grab, end: str
) -> None:
    def die(pid: int) -> None:
        if end == "killed":
            bench.dead.add(pid)
        bench.clock.time += TTL_S
        bench.ledger.reconcile()

    bench.add("a", "b")
    token = grab(1, "a")
    bench.ledger.leases.report("a", token, LOST)
    die(1)
    assert (bench.state("a"), bench.reason("a")) == ("recovering", "it went away")
    assert "a" in bench.ledger.repairs.due()
    for pid in (2, 3, 4):
        token = grab(pid, "b")
        bench.ledger.leases.report("b", token, BAD_RUN)
        die(pid)
    assert bench.state("b") == "quarantined"


def test_a_device_over_the_limit_is_quarantined_when_it_comes_back(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a")
    for _ in range(2):
        _fail(bench, grab)
    _fail(bench, grab, LOST)
    work = bench.ledger.repairs.begin("a", process(2))
    assert work is not None
    bench.ledger.repairs.end("a", work.token, Event.GAVE_UP, "unplugged")
    assert bench.state("a") == "absent"
    bench.add("a")  # it was plugged in again, and found
    assert bench.state("a") == "quarantined"


@pytest.mark.parametrize("quarantined", [False, True])
def test_a_drain_that_is_taken_back_during_a_repair_does_not_make_the_device_ready(
    bench: Bench, grab: Grab, *, quarantined: bool
) -> None:
    bench.add("a")
    for _ in range(2):
        _fail(bench, grab)
    _fail(bench, grab, BAD_RUN if quarantined else LOST)
    work = bench.ledger.repairs.begin("a", process(2), force=True)
    assert work is not None
    bench.ledger.devices.apply("a", Event.DRAIN, "a look")
    bench.ledger.devices.apply("a", Event.UNDRAIN, "")
    ended = Event.NOT_PASSED if quarantined else Event.GAVE_UP
    bench.ledger.repairs.end("a", work.token, ended, "no better", retry_in_s=60)
    bench.ledger.reconcile()
    assert bench.state("a") == ("quarantined" if quarantined else "absent")


def test_a_wall_clock_that_is_set_back_puts_off_no_repair(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    _fail(bench, grab, LOST)
    work = bench.ledger.repairs.begin("a", process(2))
    assert work is not None
    bench.ledger.repairs.end("a", work.token, Event.GAVE_UP, "dead", retry_in_s=100)
    assert bench.ledger.repairs.begin("a", process(2)) is None
    bench.clock.set_by -= 365 * 86_400
    assert "a" in bench.ledger.repairs.due()
    assert bench.ledger.repairs.begin("a", process(2))


def test_the_longest_overdue_repair_comes_first(bench: Bench, grab: Grab) -> None:
    names = [f"d{n:02}" for n in range(20)]
    bench.add(*names)
    for name in names:
        token = grab(1, name)
        bench.ledger.leases.report(name, token, LOST)
        bench.ledger.leases.release(token, [name])
    order = names[7:] + names[:7]
    for name in order:
        work = bench.ledger.repairs.begin(name, process(2))
        assert work is not None
        bench.ledger.repairs.end(name, work.token, Event.GAVE_UP, "dead", retry_in_s=10)
        bench.clock.time += 1
    bench.clock.time += 100
    assert list(bench.ledger.repairs.due()) == order


def test_the_history_names_who_looks_for_an_absent_device(bench: Bench) -> None:
    key = bench.ledger.devices.record_absent("a", "android:a", "unplugged")
    assert bench.ledger.repairs.begin(key, process(7), force=True)
    assert bench.ledger.devices.history(key)[-1].text.endswith("process 7 looks for it again")
