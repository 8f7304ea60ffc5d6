"""Failures of tests with devices: reported to the pool, with the logs of their devices kept."""

import contextlib
import hashlib
import re
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.errors import DeviceError, HarnessError, LeaseLostError, one_line
from harness.paths import safe_file_name
from harness.pool.failure_policy import Work
from harness.pool.lease import Lease
from harness.pytest_plugin.items import SESSION_FIXTURE, SESSION_ID
from harness.pytest_plugin.terminal import LOST, PHASE
from harness.results.records import RunStatus, TelemetrySeries
from harness.runtimes.base import Runtime
from harness.runtimes.deployed import DeployedRuntime
from harness.telemetry.device_log import EMPTY, read_device_log
from harness.workloads.session import Session

TEST = pytest.StashKey["TestState"]()
_SHOWN_LINES = 40


@dataclass
class TestState:
    """A test that holds devices.

    Attributes:
        sessions: those that its fixtures opened.
        ended: whether the call phase is over; Ctrl-C in the middle is no end.
        failure: type and text of the error that it ended with, expected or not; else empty.
        began: seconds since 1970.
    """

    __test__ = False

    lease: Lease
    temporary: pytest.TempPathFactory
    sessions: list[Session] = field(default_factory=list)
    ended: bool = False
    failure: str = ""
    began: float = field(default_factory=time.time)

    @property
    def status(self) -> RunStatus:
        """Status of the runs that the test records."""
        return "failed" if self.failure else "done" if self.ended else "interrupted"


def case_of(item: pytest.Item) -> str:
    """Return a test's node id without the session: the same in all `--repeat` sessions."""
    session = getattr(getattr(item, "callspec", None), "params", {}).get(SESSION_FIXTURE)
    if session is None:
        return item.nodeid
    own = rf"(?<=\[){SESSION_ID}{session + 1}(-|(?=\]))|-{SESSION_ID}{session + 1}(?=[-\]])"
    return re.sub(own, "", item.nodeid, count=1).replace("[]", "")


class FailureReports:
    """Plugin that adds the failures and the logs of tests' devices to their reports."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: "pytest.CallInfo[None]"
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a failure to the pool, and complete the test's report."""
        report = yield
        if TEST in item.stash:
            _record(item, call, report)
            report.user_properties = list(item.user_properties)
        return report


def _record(item: pytest.Item, call: "pytest.CallInfo[None]", report: pytest.TestReport) -> None:
    """Report a failure to the pool, and add the logs of the devices to the test's report."""
    test = item.stash[TEST]
    test.ended = test.ended or call.when == "call"
    if call.excinfo is None:
        if call.when == "call":
            with contextlib.suppress(HarnessError):
                test.lease.report_success(_work_of(item, test))
        return
    error = call.excinfo.value
    if not isinstance(error, Exception | pytest.fail.Exception):  # Ctrl-C, or a skip
        return
    if call.when != "teardown":
        test.failure = f"{type(error).__name__}: {error}"
    failure = _device_failure(error)
    if report.outcome == "failed" and call.when != "teardown":
        failure = _lost_lease(test, failure) or failure
    lost = failure is not None and failure.loses_device
    # An expected failure has no logs, but may lose a device.
    is_failure = report.outcome == "failed"
    if is_failure and not lost:
        _attach_logs(item, report, test)
    blame = "" if failure is None else _report_to_pool(item, test, failure)
    if blame:
        report.sections.append(("the test is at fault, not the devices", blame))
    elif is_failure and lost:
        # Reporters count a failure outside the call as an error: the test itself did not fail.
        if report.when == "call":
            setattr(report, PHASE, report.when)
            report.when = "setup"
        setattr(report, LOST, True)
        title = "lost lease" if isinstance(failure, LeaseLostError) else "lost device"
        report.sections.append((title, str(failure)))


def _lost_lease(test: TestState, failure: HarnessError | None) -> HarnessError | None:
    """Return the loss of the test's lease, which is then the cause of its failure."""
    if failure is not None and failure.loses_device:
        return None
    try:
        test.lease.verify()
    except LeaseLostError as lost:
        return lost
    return None


def _report_to_pool(item: pytest.Item, test: TestState, failure: HarnessError) -> str:
    """Report a failure; return why it counts against the test, if it does."""
    item.user_properties.append(("qnnfarm.failure", f"{type(failure).__name__}: {failure}"))
    with contextlib.suppress(HarnessError):
        return test.lease.report(failure, _work_of(item, test))
    return ""


def _work_of(item: pytest.Item, test: TestState) -> Work:
    """Return a test as the pool knows it: another one once its file has changed."""
    case = case_of(item)
    digest = hashlib.sha256(case.encode())
    with contextlib.suppress(OSError):
        digest.update(item.path.read_bytes())
    return Work(digest.hexdigest(), f"test {case}", test.began)


def _attach_logs(item: pytest.Item, report: pytest.TestReport, test: TestState) -> None:
    try:
        folder, sections = collect_logs(test, item.name)
    except OSError as error:  # such as a full disk; the test's own failure is what counts
        reason = f"{error.filename or 'this host'}: {error.strerror or error}"
        report.sections.append(("evidence", f"cannot be kept: {reason}"))
        return
    item.user_properties.append(("qnnfarm.evidence", str(folder)))
    report.sections += sections


def _device_failure(error: BaseException) -> HarnessError | None:
    """Return the failure of a device, or of the way to it, that made the test fail."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        if isinstance(cause, DeviceError) or (
            isinstance(cause, HarnessError) and cause.loses_device
        ):
            return cause
        visited.add(id(cause))
        cause = cause.__cause__
    return None


def collect_logs(test: TestState, name: str) -> tuple[Path, list[tuple[str, str]]]:
    """Read the devices' logs while the lease holds, and write them into a folder of the test.

    Where a log cannot be read, its section says why.

    Returns:
        The folder, and titles and ends of the logs for the report.
    """
    folder = test.temporary.mktemp(f"qnnfarm-{safe_file_name(name)[:60]}")
    sections: list[tuple[str, str]] = []
    seconds = time.time() - test.began
    for device in test.lease.devices:
        sessions = [session for session in test.sessions if session.device is device]
        for title, text in _device_logs(device, sessions, seconds):
            path = folder / f"{safe_file_name(device.serial)}-{title.replace(' ', '-')}"
            path.write_text(text, encoding="utf-8", errors="replace")
            if text.strip() not in {"", EMPTY}:  # the report has no sections that say nothing
                sections.append((f"{title} of {device.serial}", _tail(text, path)))
    return folder, sections


def _device_logs(
    device: Device, sessions: list[Session], seconds: float
) -> Iterator[tuple[str, str]]:
    for number, session in enumerate(sessions):
        mark, runtime = f" {number}" if number else "", session.runtime
        yield f"runner log{mark}", _runner_log(runtime)
        if isinstance(runtime, DeployedRuntime) and runtime.samples:
            yield f"telemetry{mark}.csv", as_csv(runtime.samples)
    yield from read_device_log(device, seconds).items()


def as_csv(series: Sequence[TelemetrySeries]) -> str:
    """Return samples as CSV in long form, a line each."""
    lines = ["channel,unit,t_s,value"]
    for one in series:
        channel = one.channel.replace(",", ";")
        for moment, value in zip(one.t_s, one.values, strict=True):
            if value is not None:
                lines.append(f"{channel},{one.unit},{moment:.2f},{value:.12g}")
    return "\n".join([*lines, ""])


def _runner_log(runtime: Runtime) -> str:
    try:
        return runtime.read_log() or EMPTY
    except HarnessError as error:
        return f"cannot be read: {error}"


def _tail(text: str, path: Path) -> str:
    lines = text.splitlines()
    tail = [one_line(line, 400) for line in lines[-_SHOWN_LINES:]]
    head = f"the last {_SHOWN_LINES} of {len(lines)} lines; " if len(lines) > _SHOWN_LINES else ""
    return "\n".join([f"{head}all in {path}", *tail])
