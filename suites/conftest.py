"""Fixtures that the suites share, those of plugins too."""

from typing import TYPE_CHECKING

import pytest

from harness.pytest_plugin.terminal import end_session
from suites.parameters import SuiteParameters, parameters

if TYPE_CHECKING:
    from buildlib.container.container import GenAIContainer


@pytest.fixture(scope="session")
def suite_parameters(pytestconfig: pytest.Config) -> SuiteParameters:
    """Values given by `--suite-param`."""
    return parameters(pytestconfig)


@pytest.fixture(autouse=True)
def fitting_container(request: pytest.FixtureRequest) -> None:
    """Skip tests of dialogs with a text encoder, and the other way round; no device is leased."""
    if not {"container", "session"}.intersection(request.fixturenames):
        return
    container: GenAIContainer = request.getfixturevalue("container")
    needs_encoder = getattr(request.module, "NEEDS_ENCODER", False)
    if container.embeds != needs_encoder:
        pytest.skip(f"the container holds a {'text encoder' if container.embeds else 'dialog'}")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Refuse parameters that cannot be used before anything runs."""
    try:
        parameters(collector.config)
    except pytest.UsageError as error:
        end_session(collector.config, str(error))
