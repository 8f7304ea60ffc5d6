"""The fixtures. Nothing heavy is imported before a test asks for a device."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from harness.pytest_plugin.keeper import LeaseKey, purpose, require
from harness.pytest_plugin.marker import MarkerError, uses_device, wish_of
from harness.pytest_plugin.options import read_settings
from harness.pytest_plugin.state import ROWS, TEST, TestState, keeper_of, run_uid
from harness.pytest_plugin.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildlib.container.container import GenAIContainer
    from harness.devices.base import Device
    from harness.pool.pool import Pool
    from harness.pytest_plugin.keeper import Held
    from harness.pytest_plugin.measuring import MeasurementRecorder
    from harness.pytest_plugin.running import ContainerRunner
    from harness.results.records import Run
    from harness.results.store import ResultsStore

SESSION_FIXTURE = "_qnnfarm_session"
SESSION_ID = "session"
"""How a session is called in the name of a test, with its number from 1."""
_RESULTS = "qnnfarm-results.db"


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> "Pool":
    """The pool of devices; what tests lease comes from it."""
    return _open_pool(pytestconfig)


def _open_pool(config: pytest.Config) -> "Pool":
    from harness.errors import HarnessError

    try:
        return keeper_of(config).pool
    except HarnessError as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    """Fail with what went wrong in one line, without what it came from."""
    raise pytest.fail.Exception(f"{type(error).__name__}: {error}", pytrace=False) from None


@pytest.fixture
def container(request: pytest.FixtureRequest) -> "GenAIContainer":
    """The container given by `--container`; with several, the test runs once with each."""
    from buildlib.container.container import GenAIContainer
    from buildlib.errors import BuildError

    folder: Path | None = getattr(request, "param", None)
    if folder is None:
        pytest.skip("no container: give one with --container DIR")
    try:
        return GenAIContainer.load(folder)
    except BuildError as error:
        _fail(error)


@pytest.fixture
def _qnnfarm_session(request: pytest.FixtureRequest) -> int:
    """Which of the `--repeat` sessions this is, from 0."""
    return int(getattr(request, "param", 0))


@pytest.fixture
def _qnnfarm_lease(
    request: pytest.FixtureRequest,
    _qnnfarm_session: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> "Held":
    """The lease that the test's marker asks for."""
    from harness.errors import HarnessError, RequirementError

    item: pytest.Item = request.node
    taken = _container_of(request)
    key = key_of(item, taken.path if taken is not None else None)
    kinds = frozenset(member.spec.type for member in _open_pool(request.config).members())
    wanted = require(key.wish, None if taken is None else taken.metadata.target, kinds)
    keeper = keeper_of(request.config)
    try:
        waiting = Waiting(item, wanted, keeper.pool.members)
        held = keeper.borrow(key, wanted, purpose(item.name), waiting)
    except RequirementError as error:
        if read_settings(request.config).fail_missing:
            _fail(error)
        pytest.skip(str(error))
    except HarnessError as error:
        _fail(error)
    item.stash[TEST] = TestState(held, tmp_path_factory)
    for properties in held.properties():
        item.user_properties += [
            ("qnnfarm.device", properties.serial),
            ("qnnfarm.soc", properties.soc),
            ("qnnfarm.emulator", str(properties.emulator).lower()),
        ]
    item.user_properties.append(("qnnfarm.session", key.session))
    return held


def _container_of(request: pytest.FixtureRequest) -> "GenAIContainer | None":
    """The container that the test takes, if `container` is one to it."""
    from buildlib.container.container import GenAIContainer

    if "container" not in request.fixturenames:
        return None
    taken = request.getfixturevalue("container")
    return taken if isinstance(taken, GenAIContainer) else None


@pytest.fixture
def devices(_qnnfarm_lease: "Held") -> "tuple[Device, ...]":
    """The leased devices of the test, as many as its marker's `count`."""
    return tuple(_qnnfarm_lease.lease.devices)


@pytest.fixture
def device(_qnnfarm_lease: "Held") -> "Device":
    """The leased device of the test."""
    (only,) = _qnnfarm_lease.lease.devices
    return only


@pytest.fixture
def _qnnfarm_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "Callable[[], ResultsStore]":
    """Opens the results store."""
    location = store_location(request.config, tmp_path_factory)

    def open_store() -> "ResultsStore":
        from harness.results.store import ResultsStore

        return ResultsStore.open(location)

    return open_store


@pytest.fixture
def run_container(
    request: pytest.FixtureRequest,
    _qnnfarm_lease: "Held",
    container: "GenAIContainer",
    _qnnfarm_store: "Callable[[], ResultsStore]",
) -> "Iterator[ContainerRunner]":
    """Runs the container on the leased device: `run_container("a prompt").text`."""
    from harness.errors import RuntimeChoiceError
    from harness.pytest_plugin.running import ContainerRunner

    item, held = request.node, _qnnfarm_lease
    state = item.stash[TEST]

    def note(run: "Run") -> None:
        item.user_properties.append(("qnnfarm.run", run.id))

    item.user_properties.append(("qnnfarm.container", container.metadata.container_sha256))
    try:
        runner = ContainerRunner(
            held.lease.devices[0],
            held.properties()[0],
            container,
            _qnnfarm_store,
            run_uid=run_uid(request.config),
            session=held.key.session,
            case=case_of(item),
            label=item.nodeid.partition("[")[0],
            on_run=note,
        )
    except RuntimeChoiceError as error:
        pytest.skip(str(error))
    state.runners.append(runner)
    yield runner
    runner.close()


@pytest.fixture
def record_measurement(
    request: pytest.FixtureRequest,
    _qnnfarm_store: "Callable[[], ResultsStore]",
) -> "Iterator[MeasurementRecorder]":
    """Records a number: `record_measurement("ttft_s", 0.05)`."""
    from harness.pytest_plugin.measuring import MeasurementRecorder

    item = request.node
    runner = None
    if "run_container" in request.fixturenames:
        runner = request.getfixturevalue("run_container")
    state = item.stash.get(TEST, None)
    rows = item.stash.setdefault(ROWS, [])
    recorder = MeasurementRecorder(
        runner,
        _qnnfarm_store,
        lambda name, value: item.user_properties.append((name, value)),
        lambda row: rows.append(dict(row)),
    )
    yield recorder
    if state is not None:
        for run_id in recorder.finish(state.status, state.failure or None):
            item.user_properties.append(("qnnfarm.run", run_id))


def store_location(config: pytest.Config, temporary: pytest.TempPathFactory) -> str:
    """Where results go: as asked, else beside the temporary folders of this pytest run."""
    db = read_settings(config).db
    if db is not None:
        return db
    base = temporary.getbasetemp()
    return str((base.parent if hasattr(config, "workerinput") else base) / _RESULTS)


def key_of(item: pytest.Item, container: Path | None = None) -> LeaseKey:
    """What a test's lease depends on.

    Args:
        container: where it is known already; else what the test is parametrized with.
    """
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    if container is None and isinstance(params.get("container"), Path):
        container = params["container"]
    return LeaseKey(wish_of(item), container, params.get(SESSION_FIXTURE, 0))


def case_of(item: pytest.Item) -> str:
    """The test by its name and parameters, which are the same in all sessions of `--repeat`."""
    session = getattr(getattr(item, "callspec", None), "params", {}).get(SESSION_FIXTURE)
    if session is None:
        return item.nodeid
    own = rf"(?<=\[){SESSION_ID}{session + 1}(-|(?=\]))|-{SESSION_ID}{session + 1}(?=[-\]])"
    return re.sub(own, "", item.nodeid, count=1).replace("[]", "")


def following_key(item: pytest.Item | None) -> LeaseKey | None:
    """The key of the test that comes next, if it needs devices."""
    if item is None or not uses_device(item):
        return None
    try:
        return key_of(item)
    except MarkerError:
        return None
