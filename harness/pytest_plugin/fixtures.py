"""Fixtures of the plugin; `device_tests` has their work, and is loaded for a test that needs it."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildlib.container.container import GenAIContainer
    from harness.devices.device import Device
    from harness.pool.lease import Lease
    from harness.pool.pool import Pool
    from harness.pytest_plugin.measurements import MeasurementRecorder
    from harness.pytest_plugin.recordings import TestRecordings
    from harness.runtimes.base import Model
    from harness.workloads.session import Session


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> "Pool":
    """The pool that tests lease devices from."""
    from harness.pytest_plugin.device_tests import open_pool

    return open_pool(pytestconfig)


@pytest.fixture
def _qnnfarm_path(request: pytest.FixtureRequest) -> Path | None:
    """One of `--container`; None if there is none, or the project has a `container` of its own."""
    return getattr(request, "param", None)


@pytest.fixture
def container(_qnnfarm_path: Path | None, pytestconfig: pytest.Config) -> "GenAIContainer":
    """The container given by `--container`; with several, the test runs once with each."""
    from harness.pytest_plugin.device_tests import open_container

    return open_container(_qnnfarm_path, pytestconfig)


@pytest.fixture
def _qnnfarm_model(request: pytest.FixtureRequest, _qnnfarm_path: Path | None) -> "Model":
    """The model that `--container` names, opened by `--runtime`; or the project's container."""
    from harness.pytest_plugin.device_tests import open_test_model

    return open_test_model(
        _qnnfarm_path or request.getfixturevalue("container").path, request.config
    )


@pytest.fixture
def _qnnfarm_session(request: pytest.FixtureRequest) -> int:
    """Number of the `--repeat` session, from 0."""
    return int(getattr(request, "param", 0))


@pytest.fixture
def _qnnfarm_lease(
    request: pytest.FixtureRequest,
    _qnnfarm_session: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> "Lease":
    """The lease that the test's marker requires."""
    from harness.pytest_plugin.device_tests import lease_devices

    return lease_devices(request, tmp_path_factory)


@pytest.fixture
def devices(_qnnfarm_lease: "Lease") -> "tuple[Device, ...]":
    """The test's leased devices, as many as its marker's `count`."""
    return tuple(_qnnfarm_lease.devices)


@pytest.fixture
def device(_qnnfarm_lease: "Lease") -> "Device":
    """The test's leased device."""
    (only,) = _qnnfarm_lease.devices
    return only


@pytest.fixture
def session(
    request: pytest.FixtureRequest, _qnnfarm_lease: "Lease", _qnnfarm_model: "Model"
) -> "Iterator[Session]":
    """The container on the leased device: `Generate.of(prompt="Hello").run(session).output`.

    Nothing is deployed before the first run, and nothing but the content store stays.
    """
    from harness.pytest_plugin.device_tests import open_session

    yield from open_session(request, _qnnfarm_lease, _qnnfarm_model)


@pytest.fixture
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, session: "Session"
) -> "Iterator[TestRecordings]":
    """Makes the recordings that workloads take, so that runs are in the results store."""
    from harness.pytest_plugin.device_tests import open_recordings

    yield from open_recordings(request, tmp_path_factory, session)


@pytest.fixture
def record_measurement(request: pytest.FixtureRequest) -> "Iterator[MeasurementRecorder]":
    """Records a number: `record_measurement("ttft_s", 0.05)`."""
    from harness.pytest_plugin.device_tests import record_measurements

    yield from record_measurements(request)
