"""Fixtures of the plugin, and its state. Nothing heavy is imported before a test needs a device."""

import re
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.pytest_plugin.leases import (
    HeldLease,
    LeaseKey,
    LeaseManager,
    WaitingNotice,
    purpose_of,
    with_target,
)
from harness.pytest_plugin.marker import MarkerError, read_marker, uses_device
from harness.pytest_plugin.options import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildlib.container.container import GenAIContainer
    from buildlib.targets import Target
    from harness.devices.device import Device
    from harness.pool.pool import Pool
    from harness.pytest_plugin.measurements import MeasurementRecorder
    from harness.pytest_plugin.recordings import TestRecordings
    from harness.results.records import RunStatus
    from harness.runtimes.base import Model
    from harness.workloads.session import Session

SESSION_FIXTURE, PATH_FIXTURE = "_qnnfarm_session", "_qnnfarm_path"
SESSION_ID = "session"
"""Begins the id of a session in a test's name, before its number from 1."""
LEASES = pytest.StashKey[LeaseManager]()
TEST = pytest.StashKey["TestState"]()
_RUN = pytest.StashKey[str]()
ROWS = pytest.StashKey[list[dict[str, object]]]()
"""A test's rows of the table of measurements."""
_RESULTS = "qnnfarm-results.db"


@dataclass
class TestState:
    """A test that holds devices.

    Attributes:
        sessions: those that its fixtures opened.
        ended: whether the call phase is over; Ctrl-C in the middle is no end.
        failure: type and text of the error that it ended with, expected or not; else empty.
        began: seconds since 1970.
    """

    __test__ = False

    held: HeldLease
    temporary: "pytest.TempPathFactory"
    sessions: "list[Session]" = field(default_factory=list)
    ended: bool = False
    failure: str = ""
    began: float = field(default_factory=time.time)

    @property
    def status(self) -> "RunStatus":
        """Status of the runs that the test records."""
        return "failed" if self.failure else "done" if self.ended else "interrupted"

    def folder(self, name: str) -> Path:
        """Make a folder for the files of a failure."""
        plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)[:60]
        return self.temporary.mktemp(f"qnnfarm-{plain}")


def run_uid(config: pytest.Config) -> str:
    """Return an id that all processes of this run of pytest share."""
    shared = getattr(config, "workerinput", {}).get("testrunuid")
    return str(shared or config.stash.setdefault(_RUN, uuid.uuid4().hex))


def leases_of(config: pytest.Config) -> LeaseManager:
    """Return this process's lease manager, which is closed when pytest ends."""
    if LEASES not in config.stash:
        manager = LeaseManager(read_settings(config))
        config.stash[LEASES] = manager
        config.add_cleanup(manager.close)
    return config.stash[LEASES]


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> "Pool":
    """The pool that tests lease devices from."""
    with _failing_in_one_line():
        return leases_of(pytestconfig).pool


@contextmanager
def _failing_in_one_line() -> "Iterator[None]":
    """Fail the test with an error of ours in one line, without a traceback."""
    from buildlib.error_base import QnnfarmError

    try:
        yield
    except QnnfarmError as error:
        text = f"{type(error).__name__}: {error}"
        raise pytest.fail.Exception(text, pytrace=False) from None


@pytest.fixture
def _qnnfarm_path(request: pytest.FixtureRequest) -> Path | None:
    """One of `--container`; None if there is none, or the project has a `container` of its own."""
    return getattr(request, "param", None)


@pytest.fixture
def container(_qnnfarm_path: Path | None, pytestconfig: pytest.Config) -> "GenAIContainer":
    """The container given by `--container`; with several, the test runs once with each."""
    from harness.runtimes.container_model import container_of

    if _qnnfarm_path is None:
        pytest.skip("no container: give one with --container DIR")
    with _failing_in_one_line():
        return container_of(_open_model(_qnnfarm_path, pytestconfig))


@pytest.fixture
def _qnnfarm_model(request: pytest.FixtureRequest, _qnnfarm_path: Path | None) -> "Model":
    """The model that `--container` names, opened by `--runtime`; or the project's container."""
    path = _qnnfarm_path or request.getfixturevalue("container").path
    return _open_model(path, request.config)


def _open_model(path: Path, config: pytest.Config) -> "Model":
    from harness.runtimes.registry import open_model

    with _failing_in_one_line():
        return open_model(path, read_settings(config).runtime)


@pytest.fixture
def _qnnfarm_session(request: pytest.FixtureRequest) -> int:
    """Number of the `--repeat` session, from 0."""
    return int(getattr(request, "param", 0))


@pytest.fixture
def _qnnfarm_lease(
    request: pytest.FixtureRequest,
    _qnnfarm_session: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> HeldLease:
    """The lease that the test's marker requires."""
    from harness.errors import RequirementError

    item: pytest.Item = request.node
    path, target = _target_of(request)
    key, leases = key_of(item, path), leases_of(request.config)
    with _failing_in_one_line():
        members = leases.pool.members
        kinds = frozenset(member.spec.type for member in members())
        requirement = with_target(key.requirement, target, kinds)
        notice = WaitingNotice(item, requirement, members)
        try:
            held = leases.acquire(key, requirement, purpose_of(item.name), notice)
        except RequirementError as error:
            others = "fail" if members() else "skip"
            if (read_settings(request.config).missing_device or others) == "fail":
                raise
            pytest.skip(str(error))
    item.stash[TEST] = TestState(held, tmp_path_factory)
    for properties in held.properties:
        item.user_properties += [
            ("qnnfarm.device", properties.serial),
            ("qnnfarm.soc", properties.soc),
            ("qnnfarm.emulator", str(properties.emulator).lower()),
        ]
    item.user_properties.append(("qnnfarm.session", key.session))
    return held


def _target_of(request: pytest.FixtureRequest) -> "tuple[Path | None, Target | None]":
    """Return what a test runs on its device, and what that was made for, as far as it says."""
    from buildlib.container.container import GenAIContainer
    from buildlib.targets import parse_target

    if "_qnnfarm_model" in request.fixturenames:
        model: Model = request.getfixturevalue("_qnnfarm_model")
        return model.path, parse_target(model.info.target) if model.info.target else None
    if "container" in request.fixturenames:
        container = request.getfixturevalue("container")
        if isinstance(container, GenAIContainer):
            return container.path, parse_target(container.metadata.target.name)
    return None, None


@pytest.fixture
def devices(_qnnfarm_lease: HeldLease) -> "tuple[Device, ...]":
    """The test's leased devices, as many as its marker's `count`."""
    return tuple(_qnnfarm_lease.lease.devices)


@pytest.fixture
def device(_qnnfarm_lease: HeldLease) -> "Device":
    """The test's leased device."""
    (only,) = _qnnfarm_lease.lease.devices
    return only


@pytest.fixture
def session(
    request: pytest.FixtureRequest, _qnnfarm_lease: HeldLease, _qnnfarm_model: "Model"
) -> "Iterator[Session]":
    """The container on the leased device: `Generate.of(prompt="Hello").run(session).output`.

    Nothing is deployed before the first run, and nothing but the content store stays.
    """
    from contextlib import suppress

    from harness.errors import HarnessError, RuntimeChoiceError
    from harness.telemetry.sampler import DEFAULT_HZ
    from harness.workloads.session import Session, SessionOptions

    item, held = request.node, _qnnfarm_lease
    item.user_properties.append(("qnnfarm.container", _qnnfarm_model.info.sha256))
    properties = held.properties[0]
    options = SessionOptions(telemetry_hz=DEFAULT_HZ, push=read_settings(request.config).push)
    opened = Session(held.lease.devices[0], _qnnfarm_model, options, properties=properties)
    try:
        _ = opened.runtime
    except RuntimeChoiceError as error:
        pytest.skip(str(error))
    item.stash[TEST].sessions.append(opened)
    yield opened
    with suppress(HarnessError):
        opened.close()


@pytest.fixture
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, session: "Session"
) -> "Iterator[TestRecordings]":
    """Makes the recordings that workloads take, so that runs are in the results store."""
    from harness.pytest_plugin.recordings import TestRecordings
    from harness.results.store import LazyResultsStore

    item = request.node
    with LazyResultsStore(store_location(request.config, tmp_path_factory)) as store:
        made = TestRecordings(
            store,
            session,
            run_uid(request.config),
            number=request.getfixturevalue("_qnnfarm_session"),
            case=case_of(item),
            label=item.nodeid.partition("[")[0].rpartition("/")[2],
        )
        yield made
        item.user_properties += [("qnnfarm.run", run.id) for run in made.runs()]


@pytest.fixture
def record_measurement(request: pytest.FixtureRequest) -> "Iterator[MeasurementRecorder]":
    """Records a number: `record_measurement("ttft_s", 0.05)`."""
    from harness.pytest_plugin.measurements import MeasurementRecorder

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


def store_location(config: pytest.Config, temporary: pytest.TempPathFactory) -> str:
    """Return where results go: `--qnnfarm-db`, else a file in pytest's temporary folder."""
    db = read_settings(config).db
    if db is not None:
        return db
    base = temporary.getbasetemp()
    return str((base.parent if hasattr(config, "workerinput") else base) / _RESULTS)


def key_of(item: pytest.Item, container: Path | None = None) -> LeaseKey:
    """Return the lease key of a test.

    Args:
        container: its folder; by default the one that the test is parametrized with.
    """
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    if container is None:
        container = params.get(PATH_FIXTURE)
    return LeaseKey(read_marker(item), container, params.get(SESSION_FIXTURE, 0))


def case_of(item: pytest.Item) -> str:
    """Return a test's node id without the session: the same in all `--repeat` sessions."""
    session = getattr(getattr(item, "callspec", None), "params", {}).get(SESSION_FIXTURE)
    if session is None:
        return item.nodeid
    own = rf"(?<=\[){SESSION_ID}{session + 1}(-|(?=\]))|-{SESSION_ID}{session + 1}(?=[-\]])"
    return re.sub(own, "", item.nodeid, count=1).replace("[]", "")


def next_lease_key(item: pytest.Item | None) -> LeaseKey | None:
    """Return the lease key of the next test, if it uses devices."""
    if item is None or not uses_device(item):
        return None
    try:
        return key_of(item)
    except MarkerError:
        return None
