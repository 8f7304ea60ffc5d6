"""Whether a failure counts against its device or against the work, by the evidence of all."""

from dataclasses import replace

import pytest

from harness.errors import (
    DeploymentCorruptError,
    DeviceLostError,
    HarnessError,
    RunnerError,
)
from harness.pool.failure_policy import FailureReport, Work, work_id
from harness.pool.states import Event
from tests.harness.pool.conftest import Bench, on_each_database


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


def _fail(bench: Bench, key: str, report: FailureReport) -> str:
    blame = bench.fail(key, report)
    bench.clock.time += 1
    return blame


def _succeed(bench: Bench, key: str, work: Work | None = None) -> None:
    token = bench.lease(2, key)
    if work is not None:
        bench.ledger.report_success(token, work)
    bench.ledger.release(token, [key], used=[key])
    bench.clock.time += 1


def _weight(bench: Bench, key: str) -> float:
    return sum(failure.weight for failure in bench.ledger.rows([key])[key].failures)


def _told(bench: Bench, key: str) -> list[str]:
    return [f"{entry.what}: {entry.text}" for entry in bench.ledger.history(key)]


def test_a_time_limit_says_nothing_about_a_device_that_answers(bench: Bench) -> None:
    bench.add("a")
    for number in range(9):
        work = _work(bench, f"cell-{number}")
        _fail(bench, "a", _crash(work, answered="it answered", kind="DeviceTimeoutError"))
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 0)
    assert "not counted: DeviceTimeoutError: cell-8: it crashed; it answered" in _told(bench, "a")


def test_work_that_fails_alike_on_two_devices_counts_against_itself(bench: Bench) -> None:
    bench.add("a", "b")
    assert _fail(bench, "a", _crash(_work(bench))) == ""
    assert _weight(bench, "a") == 1
    assert _fail(bench, "b", _crash(_work(bench))) == "it fails alike on a"
    assert (_weight(bench, "a"), _weight(bench, "b")) == (0, 0)
    assert "not counted: RunnerError: cell-1: it crashed; it fails alike on a" in _told(bench, "b")
    for _ in range(5):
        assert _fail(bench, "a", _crash(_work(bench))) == "it fails alike on b"
    assert bench.state("a") == "ready"


@pytest.mark.parametrize("is_device", [False, True], ids=["crashes", "kills everything"])
def test_scripts_that_fail_on_three_devices_put_none_out(bench: Bench, *, is_device: bool) -> None:
    bench.add("a", "b", "c")
    for number in range(9):
        for key in ("abc", "bca", "cab")[number % 3]:
            report = _crash(_work(bench, f"script-{number}"))
            _fail(bench, key, replace(report, is_device=is_device))
            assert bench.state(key) == "ready"


def test_a_device_on_which_alone_everything_fails_is_put_out(bench: Bench) -> None:
    bench.add("a", "b")
    for command in ("bench", "generate", "perplexity"):  # all with one container
        assert bench.state("a") == "ready"
        _fail(bench, "a", _crash(_use(bench, command)))
        _succeed(bench, "b", _use(bench, command))
    assert bench.state("a") == "quarantined"
    assert bench.ledger.due_repairs() == []


@on_each_database
def test_what_no_other_device_has_run_is_confirmed_by_a_probation_run_at_once(bench: Bench) -> None:
    bench.add("a")
    for returns, wait_s in enumerate((0, 120, 240)):
        for number in range(3):
            assert bench.state("a") == "ready"
            _fail(bench, "a", _crash(_work(bench, f"cell-{returns}-{number}")))
        assert bench.state("a") == "quarantined"
        bench.clock.time += max(0, wait_s - 2)
        assert bench.ledger.due_repairs() == ([] if wait_s else ["a"])
        bench.clock.time += 2
        bench.repair("a", Event.PASSED)
        assert (bench.state("a"), _weight(bench, "a")) == ("ready", 0)


def test_a_failed_probation_run_keeps_a_device_out(bench: Bench) -> None:
    bench.add("a", "b")
    for number in range(3):
        _fail(bench, "a", _crash(_work(bench, f"cell-{number}")))
    bench.repair("a", Event.NOT_PASSED, retry_in_s=60)
    for number in range(3):
        _fail(bench, "b", _crash(_work(bench, f"cell-{number}")))
    assert (bench.state("a"), bench.state("b")) == ("quarantined", "ready")
    assert bench.ledger.due_repairs() == []


def test_devices_that_fail_together_may_have_one_reason(bench: Bench) -> None:
    """Replicas of a cell that a hub takes down at once do not accuse the cell."""
    bench.add("a", "b")
    began = _work(bench)
    bench.clock.time += 5
    assert _fail(bench, "a", _crash(began)) == ""
    assert _fail(bench, "b", _crash(began)) == ""
    assert (_weight(bench, "a"), _weight(bench, "b")) == (1, 1)


@on_each_database
def test_work_that_ended_well_elsewhere_accuses_the_device(bench: Bench) -> None:
    bench.add("a", "b", "c")
    for number in range(3):
        _fail(bench, "a", _crash(_work(bench, f"cell-{number}")))
        _succeed(bench, "b", _work(bench, f"cell-{number}"))
    assert bench.state("a") == "quarantined"
    assert _fail(bench, "c", _crash(_work(bench, "cell-0"))) == ""
    assert bench.state("a") == "quarantined"


def test_one_work_counts_once_in_a_row(bench: Bench) -> None:
    bench.add("a")
    for _ in range(5):
        assert _fail(bench, "a", _crash(_work(bench))) == ""
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 1)
    once = "not counted: RunnerError: cell-1: it crashed; it failed there before, and counts once"
    assert any(line.startswith(once) for line in _told(bench, "a"))
    for number in range(2):  # but failures of several works are the device's
        _fail(bench, "a", _crash(_work(bench, f"other-{number}")))
    assert bench.state("a") == "quarantined"


def test_a_container_counts_once_whatever_is_done_with_it(bench: Bench) -> None:
    bench.add("a", "b")
    for command in ("generate", "bench", "perplexity", "bench"):
        assert _fail(bench, "a", _crash(_use(bench, command))) == ""
    assert (bench.state("a"), _weight(bench, "a")) == ("ready", 1)
    assert _fail(bench, "b", _crash(_use(bench, "embed"))) == "it fails alike on a"
    assert (_weight(bench, "a"), _weight(bench, "b")) == (0, 0)


@pytest.mark.parametrize(
    ("failure", "times"),
    [
        (DeviceLostError("a", "a push", "it is offline"), 3),
        (DeploymentCorruptError("a", "model.bin", "0" * 64, "1" * 64), 2),
        (RunnerError("a", "genie-t2t-run", "was killed by signal 11", 139, ""), 0),
    ],
)
def test_what_no_container_can_cause_counts_each_time(
    bench: Bench, failure: HarnessError, times: int
) -> None:
    bench.add("a")
    for _ in range(times or 9):
        _fail(bench, "a", FailureReport.of(failure, work=_use(bench, "bench")))
        if bench.state("a") == "recovering":
            bench.repair("a", Event.RECOVERED, force=True)
    assert bench.state("a") == ("quarantined" if times else "ready")


def test_unnamed_failures_are_not_compared(bench: Bench) -> None:
    bench.add("a", "b")
    for _ in range(3):
        _fail(bench, "a", _crash(None))
        _fail(bench, "b", _crash(None))
    assert (bench.state("a"), bench.state("b")) == ("quarantined", "quarantined")


def test_what_other_users_wrote_into_the_ledger_reaches_nobody_raw(bench: Bench) -> None:
    bench.add("a", "b")
    bench.sql("UPDATE pool_devices SET name = :name WHERE key = 'a'", name="p\x1b[31m1\n")
    bench.sql("INSERT INTO pool_history (key, what, text) VALUES ('b', :what, :what)", what="y\x1b")
    _fail(bench, "a", _crash(_work(bench)))
    assert _fail(bench, "b", _crash(_work(bench))).isprintable()
    assert all(text.isprintable() for text in _told(bench, "b"))
