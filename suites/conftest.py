"""What the suites have in common."""

import pytest

from suites.parameters import SuiteParameters, parameters


@pytest.fixture(scope="session")
def suite_parameters(pytestconfig: pytest.Config) -> SuiteParameters:
    """What was given by `--suite-param`."""
    return parameters(pytestconfig)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters that cannot be used before anything runs."""
    parameters(metafunc.config)
