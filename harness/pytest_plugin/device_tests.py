"""Work of the fixtures: pool, lease, session, recordings and measurements of a test."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.error_base import QnnfarmError
from buildlib.targets import Target, parse_target
from harness.errors import HarnessError, RequirementError, RuntimeChoiceError
from harness.pool.lease import Lease
from harness.pool.pool import Pool
from harness.pytest_plugin.failures import TEST, FailureReports, TestState, case_of
from harness.pytest_plugin.items import ROWS
from harness.pytest_plugin.leases import (
    LeaseManager,
    key_of,
    purpose_of,
    tell_wait,
    with_target,
)
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.pytest_plugin.options import read_settings
from harness.pytest_plugin.recordings import TestRecordings
from harness.results.store import LazyResultsStore
from harness.runtimes.base import Model
from harness.runtimes.bundles.bundle import pushed_files
from harness.runtimes.container_model import container_of
from harness.runtimes.registry import open_model
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.session import Session, SessionOptions

_LEASES, _FAILURES = "qnnfarm-leases", "qnnfarm-failures"
_RUN = pytest.StashKey[str]()
_RESULTS = "qnnfarm-results.db"


def open_pool(config: pytest.Config) -> Pool:
    """Return the pool of this process."""
    with _failing_in_one_line():
        return _leases_of(config).pool


def open_container(path: Path | None, config: pytest.Config) -> GenAIContainer:
    """Open one of `--container`; skip the test if there is none."""
    if path is None:
        pytest.skip("no container: give one with --container DIR")
    with _failing_in_one_line():
        return container_of(open_test_model(path, config))


def open_test_model(path: Path, config: pytest.Config) -> Model:
    """Open a model by `--runtime`."""
    with _failing_in_one_line():
        return open_model(path, read_settings(config).runtime)


def lease_devices(request: pytest.FixtureRequest, temporary: pytest.TempPathFactory) -> Lease:
    """Lease the devices of a test's marker; without any such device it fails, or is skipped."""
    item: pytest.Item = request.node
    path, target = _target_of(request)
    key, leases = key_of(item, path), _leases_of(request.config)
    with _failing_in_one_line():
        members = leases.pool.members
        kinds = frozenset(member.spec.type for member in members())
        requirement = with_target(key.requirement, target, kinds)
        on_wait = partial(tell_wait, item, requirement)
        try:
            lease = leases.acquire(key, requirement, purpose_of(item.name), on_wait)
        except RequirementError as error:
            others = "fail" if members() else "skip"
            if (read_settings(request.config).missing_device or others) == "fail":
                raise
            pytest.skip(str(error))
    item.stash[TEST] = TestState(lease, temporary)
    for properties in lease.properties:
        item.user_properties += [
            ("qnnfarm.device", properties.serial),
            ("qnnfarm.soc", properties.soc),
            ("qnnfarm.emulator", str(properties.emulator).lower()),
        ]
    item.user_properties.append(("qnnfarm.session", key.session))
    return lease


def open_session(request: pytest.FixtureRequest, lease: Lease, model: Model) -> Iterator[Session]:
    """Open a session of a model on the leased device; skip the test if no runtime fits."""
    item = request.node
    item.user_properties.append(("qnnfarm.container", model.info.sha256))
    settings = read_settings(request.config)
    options = SessionOptions(
        telemetry_hz=DEFAULT_HZ,
        push=pushed_files(settings.push),
        runner_timeout_s=settings.run_timeout_s,
    )
    session = Session(lease.devices[0], model, options, properties=lease.properties[0])
    try:
        _ = session.runtime
    except RuntimeChoiceError as error:
        pytest.skip(str(error))
    item.stash[TEST].sessions.append(session)
    yield session
    with suppress(HarnessError):
        session.close()


def open_recordings(
    request: pytest.FixtureRequest, temporary: pytest.TempPathFactory, session: Session
) -> Iterator[TestRecordings]:
    """Record runs in the results store, and name them in junit.xml."""
    item = request.node
    with LazyResultsStore(_store_location(request.config, temporary)) as store:
        recordings = TestRecordings(
            store,
            session,
            _run_uid(request.config),
            number=request.getfixturevalue("_qnnfarm_session"),
            case=case_of(item),
            label=item.nodeid.partition("[")[0].rpartition("/")[2],
        )
        yield recordings
        item.user_properties += [("qnnfarm.run", run.id) for run in recordings.runs()]


def record_measurements(request: pytest.FixtureRequest) -> Iterator[MeasurementRecorder]:
    """Record numbers of a test, and store them where it has a session."""
    item = request.node
    runs = request.getfixturevalue("recording") if "session" in request.fixturenames else None
    state = item.stash.get(TEST, None)
    recorder = MeasurementRecorder(
        runs,
        lambda name, value: item.user_properties.append((name, value)),
        item.stash.setdefault(ROWS, []),
    )
    yield recorder
    if state is not None:
        for run_id in recorder.finish(state.status, state.failure or None):
            item.user_properties.append(("qnnfarm.run", run_id))


@contextmanager
def _failing_in_one_line() -> Iterator[None]:
    """Fail the test with an error of ours in one line, without a traceback."""
    try:
        yield
    except QnnfarmError as error:
        text = f"{type(error).__name__}: {error}"
        raise pytest.fail.Exception(text, pytrace=False) from None


def _leases_of(config: pytest.Config) -> LeaseManager:
    """Return this process's lease manager, which sees its tests end, and closes with pytest."""
    manager: LeaseManager | None = config.pluginmanager.get_plugin(_LEASES)
    if manager is None:
        manager = LeaseManager(read_settings(config))
        config.pluginmanager.register(manager, _LEASES)
        config.pluginmanager.register(FailureReports(), _FAILURES)
        config.add_cleanup(manager.close)
    return manager


def _target_of(request: pytest.FixtureRequest) -> tuple[Path | None, Target | None]:
    """Return the container of a test and its target, as far as it has them."""
    if "_qnnfarm_model" in request.fixturenames:
        model: Model = request.getfixturevalue("_qnnfarm_model")
        return model.path, parse_target(model.info.target) if model.info.target else None
    if "container" in request.fixturenames:
        container = request.getfixturevalue("container")
        if isinstance(container, GenAIContainer):
            return container.path, parse_target(container.metadata.target.name)
    return None, None


def _run_uid(config: pytest.Config) -> str:
    """Return an id that all processes of this run of pytest share."""
    shared = getattr(config, "workerinput", {}).get("testrunuid")
    return str(shared or config.stash.setdefault(_RUN, uuid.uuid4().hex))


def _store_location(config: pytest.Config, temporary: pytest.TempPathFactory) -> str:
    """Return where results go: `--qnnfarm-db`, else a file in pytest's temporary folder."""
    db = read_settings(config).db
    if db is not None:
        return db
    base = temporary.getbasetemp()
    return str((base.parent if hasattr(config, "workerinput") else base) / _RESULTS)
