"""Terminal output of the plugin: lines and rows that travel as attributes of reports.

xdist sends reports from its workers to the process with the terminal; without workers, pytest
passes them on itself.
"""

import contextlib
from collections.abc import Generator
from typing import NoReturn

import pytest
from _pytest.junitxml import xml_key

USAGE_ERROR = "qnnfarm_usage_error"
"""Attribute of a collection report: why the session ends."""
WAITING = "qnnfarm_waiting"
"""Attribute of a setup report: the line of a test that waits for its devices."""
ROWS = "qnnfarm_rows"
"""Attribute of a test's last report: its rows of the table, in plain types for xdist."""
LOST = "qnnfarm_lost"
"""Attribute of the report of a test that lost its device."""
PHASE = "qnnfarm_phase"
"""Attribute of the same report: in which phase of the test that was."""
_ON_SETUP = "failed on setup"
"""Prefix that pytest gives an error outside the teardown in junit.xml."""


def end_session(config: pytest.Config, message: str) -> NoReturn:
    """End the session with a usage error, from a hook of the collection.

    A worker of xdist has no terminal: it sends the message as a failed collection report.

    Raises:
        pytest.UsageError: outside workers of xdist.
        pytest.exit.Exception: in a worker.
    """
    if not hasattr(config, "workerinput"):
        raise pytest.UsageError(message)
    report = pytest.CollectReport("", "failed", message, [])
    setattr(report, USAGE_ERROR, message)
    config.hook.pytest_collectreport(report=report)
    pytest.exit(message, returncode=pytest.ExitCode.USAGE_ERROR)


class UsageErrors:
    """Ends the session with a worker's usage error, in the process that has the terminal."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Raise a worker's `pytest.UsageError` here."""
        message = getattr(report, USAGE_ERROR, None)
        if message is not None:
            raise pytest.UsageError(message)


class TestReports:
    """Prints notices and rows of reports; under xdist, in the process with the terminal."""

    __test__ = False

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[dict[str, object]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Collect rows of the table, write a notice, and restore the phase of a lost device.

        Reporters count a failure outside the call as an error, so the report says `setup` to them.
        """
        self._rows += getattr(report, ROWS, [])
        notice = getattr(report, WAITING, None)
        if notice is not None:
            self._write_notice(notice)
        yield
        phase = getattr(report, PHASE, None)
        if phase is not None:
            report.when = phase
            self._reword_junit(report)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table of measurements."""
        if not self._rows:
            return
        from harness.pytest_plugin.measurements import format_table

        terminalreporter.section("measurements")
        for line in format_table(self._rows):
            terminalreporter.write_line(line)

    def _write_notice(self, notice: str) -> None:
        """Write which test waits for devices, past pytest's capture."""
        manager = self._config.pluginmanager
        reporter: pytest.TerminalReporter | None = manager.get_plugin("terminalreporter")
        if reporter is None:
            return
        capture = manager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            reporter.ensure_newline()
            if self._config.get_terminal_writer().width_of_current_line:  # the dots of xdist
                reporter.line("")
            reporter.write_line(notice)
            reporter.flush()

    def _reword_junit(self, report: pytest.TestReport) -> None:
        xml = self._config.stash.get(xml_key, None)
        if xml is None:
            return
        for node in xml.node_reporter(report).nodes:
            message = node.get("message", "")
            if node.tag == "error" and message.startswith(_ON_SETUP):
                node.set("message", f"lost its device on call{message.removeprefix(_ON_SETUP)}")
