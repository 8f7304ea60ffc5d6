"""A test that waits for its devices says so, once: for which, and who holds them since when.

The line travels as an attribute of a report: that is what xdist carries from its workers to the one
process that has a terminal, and what pytest sends round where there are no workers. The report is
that of a setup in which nothing has failed so far, which no reporter shows or counts.
"""

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.pool.requirement import Requirement
    from harness.pool.status import MemberStatus

AFTER_S = 5.0
"""What takes less is not worth a line."""
WAITS = "qnnfarm_waits"
"""Attribute of a report that carries the line of a test that waits."""


class Waiting:
    """One test's wait; to be called now and then while it lasts.

    Args:
        members: all devices of the pool as they are now.
    """

    def __init__(
        self,
        item: pytest.Item,
        requirement: "Requirement",
        members: "Callable[[], Sequence[MemberStatus]]",
    ) -> None:
        self._item = item
        self._requirement = requirement
        self._members = members
        self._due = time.monotonic() + AFTER_S

    def __call__(self) -> None:
        """Say it if it is time."""
        if time.monotonic() < self._due:
            return
        self._due = float("inf")
        from harness.errors import HarnessError

        try:
            members = self._members()
            told = line(self._item.nodeid, self._requirement, members)
        except HarnessError:  # what keeps the pool from answering ends the wait, too
            return
        _send(self._item, told)


class WaitingLines:
    """Writes the lines, in the process that has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what a report carries, past whatever captures output."""
        told = getattr(report, WAITS, None)
        manager = self._config.pluginmanager
        reporter: pytest.TerminalReporter | None = manager.get_plugin("terminalreporter")
        if told is None or reporter is None:
            return
        capture = manager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            reporter.ensure_newline()
            if self._config.get_terminal_writer().width_of_current_line:  # the dots of xdist
                reporter.line("")
            reporter.write_line(told)
            reporter.flush()


def line(name: str, requirement: "Requirement", members: "Sequence[MemberStatus]") -> str:
    """Who waits, for what, and what stands in the way of each device that would do.

    Raises:
        RequirementError: none would do any more.
    """
    from harness.errors import one_line
    from harness.pool.requirement import candidates
    from harness.pool.status import describe_wait

    told = describe_wait(candidates(requirement, members))
    return f"qnnfarm: {name} waits for {one_line(str(requirement))}: {told}"


def _send(item: pytest.Item, told: str) -> None:
    report = pytest.TestReport(
        item.nodeid, item.location, {}, outcome="passed", longrepr=None, when="setup"
    )
    setattr(report, WAITS, told)
    item.ihook.pytest_runtest_logreport(report=report)
