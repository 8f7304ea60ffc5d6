"""What the report of a test says about its devices."""

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
from _pytest.junitxml import xml_key

from harness.pytest_plugin.state import TEST, TestState, keeper_of

if TYPE_CHECKING:
    from harness.errors import HarnessError

REPORTED_ROWS = "qnnfarm_rows"
"""Attribute of the last report of a test: its rows of the table, in plain types for xdist."""
LOST = "qnnfarm_lost"
"""Attribute of the report of a test that lost its device."""
_PHASE = "qnnfarm_phase"
"""Attribute of the same: in which phase of the test that was."""
_ON_SETUP = "failed on setup"
"""How pytest begins what it says in junit.xml of an error that is not of the teardown."""


def judge(item: pytest.Item, call: "pytest.CallInfo[None]", report: pytest.TestReport) -> None:
    """Give evidence to the pool, and to people, when a test with devices fails."""
    test = item.stash[TEST]
    test.ended = test.ended or call.when == "call"
    if call.excinfo is None:
        return
    error = call.excinfo.value
    if not isinstance(
        error, Exception | pytest.fail.Exception
    ):  # Ctrl-C and skips say nothing about a device
        return
    if call.when != "teardown":
        test.failure = f"{type(error).__name__}: {error}"
    if report.outcome != "failed":  # an expected failure, whose device may be gone all the same
        failure = _device_failure(error)
        if failure is not None:
            _accuse(item, test, failure)
        return
    failure = _device_failure(error)
    lost = failure is not None and failure.loses_device
    if not lost:
        _attach(item, report, test)
    if failure is not None:
        _accuse(item, test, failure)
    if lost:
        # Reporters count what fails outside the call as an error: the test itself said nothing.
        if report.when == "call":
            setattr(report, _PHASE, report.when)
            report.when = "setup"
        setattr(report, LOST, True)
        report.sections.append(("lost device", str(failure)))


class LostDevices:
    """Names where a test lost its device, once reporters have counted it as an error."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Give the report its phase back, and junit.xml the words for it."""
        yield
        phase = getattr(report, _PHASE, None)
        if phase is not None:
            report.when = phase
            self._say_in_junit(report)

    def _say_in_junit(self, report: pytest.TestReport) -> None:
        xml = self._config.stash.get(xml_key, None)
        if xml is None:
            return
        for node in xml.node_reporter(report).nodes:
            message = node.get("message", "")
            if node.tag == "error" and message.startswith(_ON_SETUP):
                node.set("message", f"lost its device on call{message.removeprefix(_ON_SETUP)}")


def _accuse(item: pytest.Item, test: TestState, failure: "HarnessError") -> None:
    keeper = keeper_of(item.config)
    item.user_properties.append(("qnnfarm.failure", f"{type(failure).__name__}: {failure}"))
    if failure.loses_device or failure.needs_recovery:
        keeper.lose(test.held, failure)
    else:
        keeper.accuse(test.held, failure)


def _attach(item: pytest.Item, report: pytest.TestReport, test: TestState) -> None:
    from harness.pytest_plugin.evidence import collect

    try:
        folder, sections = collect(test, item.name)
    except OSError as error:  # as a full disk has them; the test's own failure is what counts
        told = f"{error.filename or 'this host'}: {error.strerror or error}"
        report.sections.append(("evidence", f"cannot be kept: {told}"))
        return
    item.user_properties.append(("qnnfarm.evidence", str(folder)))
    report.sections += sections


def _device_failure(error: BaseException) -> "HarnessError | None":
    """What a device, or the way to it, did wrong, if that is why the test failed."""
    from harness.errors import DeviceError, HarnessError

    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, DeviceError) or (
            isinstance(cause, HarnessError) and cause.loses_device
        ):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__
    return None
