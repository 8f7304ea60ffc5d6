"""Gathers the rows of all workers, and prints them when the session ends."""

import pytest

from harness.pytest_plugin.reporting import REPORTED_ROWS


class SessionTable:
    """A plugin of its own in each process; under xdist, the controller's sees all rows."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[dict[str, object]] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the rows of a finished test."""
        self._rows += getattr(report, REPORTED_ROWS, [])

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table of what was measured."""
        if not self._rows:
            return
        from harness.pytest_plugin.summary import table

        terminalreporter.section("measurements")
        for line in table(self._rows):
            terminalreporter.write_line(line)
