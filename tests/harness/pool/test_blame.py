"""Whether a failure counts against its device or against the work, by the evidence of all."""

from collections.abc import Callable

import pytest

from harness.errors import (
    DeploymentCorruptError,
    DeviceLostError,
    HarnessError,
    RunnerError,
)
from harness.pool.failure_policy import FailureReport, Judgement, Work, work_id
from harness.pool.states import Event
from tests.harness.pool.conftest import Bench, process
from tests.harness.pool.old_formats import downgrade

Grab = Callable[..., int]


def _work(bench: Bench, name: str = "cell-1", *, began_ago_s: float = 0.0) -> Work:
    return Work(f"digest of {name}", name, bench.clock.now() - began_ago_s)


def _use(bench: Bench, command: str, container: str = "sha") -> Work:
    return Work(work_id(container, command), command, bench.clock.now())


def _crash(
    work: Work | None, *, answered: str = "", kind: str = "RunnerError", weight: float = 1.0
) -> FailureReport:
    return FailureReport(
        kind, weight, recover=False, text="it crashed", work=work, answered=answered
    )


def _fail(bench: Bench, grab: Grab, key: str, report: FailureReport) -> Judgement:
    token = grab(1, key)
    judgement = bench.ledger.leases.report(key, token, report)
    bench.ledger.leases.release(token, [key], used=[key])
    bench.clock.time += 1
    assert judgement is not None
    return judgement


def _succeed(bench: Bench, grab: Grab, key: str, work: Work | None = None) -> None:
    token = grab(2, key)
    if work is not None:
        bench.ledger.leases.report_success(token, work)
    bench.ledger.leases.release(token, [key], used=[key])
    bench.clock.time += 1


def _weight(bench: Bench, key: str) -> float:
    return sum(failure.weight for failure in bench.ledger.devices.rows([key])[key].failures)


def _told(bench: Bench, key: str) -> list[str]:
    return [f"{entry.what}: {entry.text}" for entry in bench.ledger.devices.history(key)]


def test_a_time_limit_says_nothing_about_a_device_that_answers(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    for number in range(9):
        work = _work(bench, f"cell-{number}")
        _fail(bench, grab, "a", _crash(work, answered="it answered", kind="DeviceTimeoutError"))
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 0)
    assert "not counted: DeviceTimeoutError: cell-8: it crashed; it answered" in _told(bench, "a")


def test_work_that_fails_alike_on_two_devices_counts_against_itself(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a", "b")
    assert _fail(bench, grab, "a", _crash(_work(bench))) == Judgement()
    assert _weight(bench, "a") == 1
    judgement = _fail(bench, grab, "b", _crash(_work(bench)))
    assert judgement.blame == "it fails alike on a"
    assert (_weight(bench, "a"), _weight(bench, "b")) == (0, 0)
    assert "taken back: RunnerError: cell-1 fails alike on b: it crashed" in _told(bench, "a")
    assert "not counted: RunnerError: cell-1: it crashed; it fails alike on a" in _told(bench, "b")
    for _ in range(5):
        assert _fail(bench, grab, "a", _crash(_work(bench))).blame == "it fails alike on b"
    assert bench.state("a") == "ready"


def test_evidence_that_comes_later_ends_a_quarantine(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    _fail(bench, grab, "a", _crash(_work(bench), weight=3))
    assert bench.state("a") == "quarantined"
    _fail(bench, grab, "b", _crash(_work(bench)))
    assert (bench.state("a"), bench.state("b")) == ("ready", "ready")
    assert "cleared: quarantined -> ready: cell-1 fails alike on b" in _told(bench, "a")
    for number in range(3):  # it is trusted as before: no quarantine stands in its record
        _fail(bench, grab, "a", _crash(_work(bench, f"other-{number}")))
    bench.clock.time += bench.rule.backoff_s
    assert bench.ledger.repairs.due() == ["a"]


def test_a_quarantine_that_rests_on_more_stands(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    _fail(bench, grab, "a", _crash(_work(bench)))
    _fail(bench, grab, "a", _crash(_work(bench, "other")))
    _fail(bench, grab, "a", FailureReport("DeploymentCorruptError", 2.0, recover=False, text="bad"))
    _fail(bench, grab, "b", _crash(_work(bench)))
    assert (bench.state("a"), _weight(bench, "a")) == ("quarantined", 3)


def test_a_failed_probation_run_is_evidence_of_its_own(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    _fail(bench, grab, "a", _crash(_work(bench), weight=3))
    run = bench.ledger.repairs.begin("a", process(2), force=True)
    assert run is not None
    bench.ledger.repairs.end("a", run.token, Event.NOT_PASSED, "bad file", retry_in_s=60)
    _fail(bench, grab, "b", _crash(_work(bench)))
    assert (bench.state("a"), _weight(bench, "a")) == ("quarantined", 0)


def test_devices_that_fail_together_may_have_one_reason(bench: Bench, grab: Grab) -> None:
    """Replicas of a cell that a hub takes down at once do not accuse the cell."""
    bench.add("a", "b")
    began = _work(bench)
    bench.clock.time += 5
    assert _fail(bench, grab, "a", _crash(began)).blame == ""
    assert _fail(bench, grab, "b", _crash(began)).blame == ""
    assert (_weight(bench, "a"), _weight(bench, "b")) == (1, 1)


def test_work_that_ended_well_elsewhere_accuses_the_device(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b", "c")
    for number in range(3):
        _fail(bench, grab, "a", _crash(_work(bench, f"cell-{number}")))
        _succeed(bench, grab, "b", _work(bench, f"cell-{number}"))
    assert bench.state("a") == "quarantined"
    assert "confirmed: RunnerError: cell-0 ended well on b: it crashed" in _told(bench, "a")
    assert _fail(bench, grab, "c", _crash(_work(bench, "cell-0"))).blame == ""
    assert bench.state("a") == "quarantined"


def test_one_work_does_not_quarantine_a_device_that_serves_others_well(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a")
    for _ in range(4):
        _fail(bench, grab, "a", _crash(_work(bench)))
        _succeed(bench, grab, "a")
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 1)
    assert [text for text in _told(bench, "a") if "served others well" in text]
    for number in range(2):  # but failures of several works are the device's
        _fail(bench, grab, "a", _crash(_work(bench, f"other-{number}")))
    assert bench.state("a") == "quarantined"


def test_work_without_a_container_counts_each_time(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    for _ in range(3):
        assert bench.state("a") == "ready"
        _fail(bench, grab, "a", _crash(_work(bench)))
    assert bench.state("a") == "quarantined"


def test_a_container_that_fails_on_the_only_device_counts_once(bench: Bench, grab: Grab) -> None:
    bench.add("a")
    assert _fail(bench, grab, "a", _crash(_use(bench, "bench"))) == Judgement()
    for _ in range(4):
        judgement = _fail(bench, grab, "a", _crash(_use(bench, "bench")))
        assert judgement == Judgement("its container failed there before, which counts once")
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 1)
    for number in range(2):  # but failures of several works are the device's
        _fail(bench, grab, "a", _crash(_work(bench, f"other-{number}")))
    assert bench.state("a") == "quarantined"


def test_a_container_counts_once_whatever_is_done_with_it(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    for command in ("generate", "bench", "perplexity", "bench"):
        _fail(bench, grab, "a", _crash(_use(bench, command)))
        _succeed(bench, grab, "a", _use(bench, "inspect"))
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 1)
    assert _fail(bench, grab, "b", _crash(_use(bench, "embed"))).blame == "it fails alike on a"
    assert (_weight(bench, "a"), _weight(bench, "b")) == (0, 0)


def test_a_container_that_runs_elsewhere_accuses_the_device_each_time(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a", "b")
    for _ in range(3):
        assert bench.state("a") == "ready"
        _fail(bench, grab, "a", _crash(_use(bench, "bench")))
        _succeed(bench, grab, "b", _use(bench, "bench"))
    assert bench.state("a") == "quarantined"


@pytest.mark.parametrize(
    ("failure", "times"),
    [
        (DeviceLostError("a", "a push", "it is offline"), 3),
        (DeploymentCorruptError("a", "model.bin", "0" * 64, "1" * 64), 2),
        (RunnerError("a", "genie-t2t-run", "was killed by signal 11", 139, ""), 0),
    ],
)
def test_what_no_container_can_cause_counts_each_time(
    bench: Bench, grab: Grab, failure: HarnessError, times: int
) -> None:
    bench.add("a")
    for _ in range(times or 9):
        _fail(bench, grab, "a", FailureReport.of(failure, work=_use(bench, "bench")))
        if bench.state("a") == "recovering":
            run = bench.ledger.repairs.begin("a", process(2), force=True)
            assert run is not None
            bench.ledger.repairs.end("a", run.token, Event.RECOVERED, "it answers")
    assert bench.state("a") == ("quarantined" if times else "ready")


def test_unnamed_failures_are_not_compared(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    for _ in range(3):
        _fail(bench, grab, "a", _crash(None))
        _fail(bench, grab, "b", _crash(None))
    assert (bench.state("a"), bench.state("b")) == ("quarantined", "quarantined")


def test_a_ledger_of_the_fifth_format_keeps_its_evidence(bench: Bench, grab: Grab) -> None:
    bench.add("a", "b")
    for _ in range(2):
        _fail(bench, grab, "a", _crash(None))
    with bench.database.writing() as db:
        downgrade(db, 5)
    bench.database.close()
    assert _weight(bench, "a") == 2
    _succeed(bench, grab, "b")
    _fail(bench, grab, "a", _crash(_work(bench)))
    assert bench.state("a") == "quarantined"


def test_what_other_users_wrote_into_the_ledger_reaches_nobody_raw(
    bench: Bench, grab: Grab
) -> None:
    bench.add("a", "b")
    with bench.database.writing() as db:
        db.execute("UPDATE devices SET name = ? WHERE key = 'a'", ("p\x1b[31m1\n",))
        db.execute("INSERT INTO totals VALUES ('b', '2026-99\x1b', 'x', 1)")
        db.execute("INSERT INTO totals VALUES ('b', '2026-01', 'y\x1b', 1)")
    _fail(bench, grab, "a", _crash(_work(bench)))
    assert _fail(bench, grab, "b", _crash(_work(bench))).blame.isprintable()
    assert all(text.isprintable() for text in _told(bench, "b"))
