"""Fixtures that the suites share."""

import pytest

from harness.pytest_plugin.terminal import end_session
from suites.parameters import SuiteParameters, parameters


@pytest.fixture(scope="session")
def suite_parameters(pytestconfig: pytest.Config) -> SuiteParameters:
    """Values given by `--suite-param`."""
    return parameters(pytestconfig)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Refuse parameters that cannot be used before anything runs."""
    try:
        parameters(collector.config)
    except pytest.UsageError as error:
        end_session(collector.config, str(error))
