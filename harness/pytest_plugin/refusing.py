"""Ends a session in one line, also from a worker of xdist, which has no terminal.

A worker sends the line as a failed report of its collection, which xdist carries to the process
that has the terminal; that one ends with it.
"""

from typing import NoReturn

import pytest

REFUSED = "qnnfarm_refused"
"""Attribute of the report of a collection that carries the line."""


def refuse(config: pytest.Config, message: str) -> NoReturn:
    """End the session as wrong use; to be called by hooks of the collection.

    Raises:
        pytest.UsageError: always, but on workers of xdist.
        pytest.exit.Exception: there.
    """
    if not hasattr(config, "workerinput"):
        raise pytest.UsageError(message)
    report = pytest.CollectReport("", "failed", message, [])
    setattr(report, REFUSED, message)
    config.hook.pytest_collectreport(report=report)
    pytest.exit(message, returncode=pytest.ExitCode.USAGE_ERROR)


class Refusals:
    """Ends the session by what workers sent; for the process that has the terminal."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """End the session if that is what the report says.

        Raises:
            pytest.UsageError: it is.
        """
        message = getattr(report, REFUSED, None)
        if message is not None:
            raise pytest.UsageError(message)
