"""Verdict of `--baseline`: measurements of the tests against earlier results in the same store."""

import pytest

from harness.console import visible
from harness.errors import NO_ANSWER, HarnessError
from harness.results import gate_formats
from harness.results.alerts import assess_store
from harness.results.gate import judge_gate
from harness.results.metrics import GATE_METRICS
from harness.results.store import ResultsStore
from harness.results.verdicts import verdict_exit_code

_RUN = "qnnfarm.run"


class BaselineGate:
    """Judges the runs of this session as `qnnfarm gate` does, in the process with the terminal.

    A regression makes pytest exit with 1, a missing verdict with 2; failed tests come first.
    """

    def __init__(self, db: str, reference: str) -> None:
        self._db = db
        self._reference = reference
        self._runs: dict[str, None] = {}
        self._lines: list[str] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the runs that a test stored."""
        if report.when == "teardown":
            self._runs |= {
                str(value): None for name, value in report.user_properties if name == _RUN
            }

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge, before the summary is printed."""
        if not self._runs:
            return
        code = self._judge()
        if session.exitstatus == pytest.ExitCode.OK and code:
            session.exitstatus = code

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the verdict."""
        if not self._lines:
            return
        terminalreporter.section(f"baseline {visible(self._reference)}")
        for line in self._lines:
            terminalreporter.write_line(visible(line))

    def _judge(self) -> int:
        try:
            with ResultsStore.open(self._db, create=False) as store:
                alerts = assess_store(store, GATE_METRICS)
                gate = judge_gate(store, self._reference, runs=tuple(self._runs), alerts=alerts)
        except HarnessError as error:
            self._lines = [f"no verdict: {error}"]
            return NO_ANSWER
        self._lines = gate_formats.to_lines(gate)
        return verdict_exit_code(gate.verdict)
