"""Fixtures that several packages' tests share: a private adb server, virtual devices, a container.

Each xdist worker has its own server on its own port, with its own key, and its own state and
cache folders, so that nothing of the user's is touched. They live as long as the test session.
"""

import contextlib
import gc
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from buildlib.builder.build import Build, BuildOutputs
from buildlib.genai import GenAIBuilderFactory
from harness.clock import Deadline
from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import ServerAddress, query
from harness.devices.adb.server import ensure_server
from harness.devices.adb.transport import AdbTransport
from harness.devices.base import ServerUnreachable
from harness.devices.device import Device
from suites.models import tiny_llama
from tests import outlier_llama
from tests.builders import builder_for
from tests.buildlib.conftest import (
    make_adapter,
    make_checkpoint,
    one_layer,
    one_layer_export,
    tiny,
    tiny_export,
    tiny_text,
)
from tests.postgresql_server import PostgresqlServer, make_cluster, running_postgresql_server
from tests.private_adb import free_port, private_environment
from tests.system import VIRTUAL, is_here, needs
from tests.waiting import IN_VAIN, PATIENCE_VARIABLE, patience_s

if TYPE_CHECKING:
    from plugins.virtual_android import manager

ROOT = Path(__file__).parents[1]
SOC = "SM8750"
_APPEARANCE = (
    "CLICOLOR", "CLICOLOR_FORCE", "COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR",
    "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
)  # fmt: skip
"""Variables by which a user's terminal changes what programs print."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of the user's own there
"""Where tests have their folders, if it is large: thousands of commits would wait for a disk."""
_WAITED_IN_VAIN = pytest.StashKey[str]()
"""Of a file: the first of its tests that waited for what never came."""
# Fixtures of all packages.
__all__ = [
    "make_adapter", "make_checkpoint", "one_layer", "one_layer_export", "tiny", "tiny_export",
    "tiny_text",
]  # fmt: skip

# The suite has the same examples each time: what it refuses, it refuses again. `make examples` has
# new ones. How long an example takes says how busy the machine is, so there is no deadline.
_CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=25, suppress_health_check=_CHECKS
)
settings.register_profile("new", print_blob=True, deadline=None, suppress_health_check=_CHECKS)
settings.load_profile("suite")


def pytest_configure() -> None:
    """Refuse to run with an installation that is older than this checkout's entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, declared in project["entry-points"].items():
        if declared.items() <= {(one.name, one.value) for one in entry_points(group=group)}:
            continue
        raise pytest.UsageError("entry points are stale: `pip install --no-deps -e .` renews them")
    # Container images set it; each of thousands of processes would compile what it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # pytest keeps what it makes of the tests' asserts
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the cores are the workers' already
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    if is_here(VIRTUAL):
        from plugins.virtual_android.namespace import FORCE_VARIABLE, probe_namespace

        if probe_namespace().kind == "none":
            os.environ[FORCE_VARIABLE] = "none"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports a plugin which this checkout is without."""
    report = yield
    lost = re.search(r"No module named '(?:tests\.)?(plugins\.\w+)", str(report.longrepr))
    if report.failed and lost and not is_here(lost[1]):
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, f"Skipped: needs {lost[1]}, which is not here"
    return report


def pytest_xdist_auto_num_workers() -> int:
    """Return how many workers `-n auto` starts: six keep two cores busy while tests wait.

    Each more imports all tests, which takes eight to thirteen seconds of a core.
    """
    return max(6, os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the collector of garbage, which finds none in what stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)  # by default a tenth of the time goes to it


def pytest_report_header() -> str | None:
    """Say where confinement is not tested."""
    if not is_here(VIRTUAL):
        return f"without {VIRTUAL}: tests that need a device skip"
    from plugins.virtual_android.namespace import probe_namespace

    support = probe_namespace()
    if support.kind != "none":
        return None
    return f"virtual devices run unconfined here: {support.reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures are set up, end a test that lacks what it needs, or would wait in vain."""
    for marker in item.iter_markers("needs"):
        needs(*marker.args)
    if first := _file_of(item).stash.get(_WAITED_IN_VAIN, None):
        pytest.fail(f"not run: {first} of the same file waited in vain", pytrace=False)
    os.environ.pop(PATIENCE_VARIABLE, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what waits in vain once end its file: its own teardown waits briefly, no other begins."""
    if call.excinfo is not None and call.excinfo.errisinstance(IN_VAIN):
        _file_of(item).stash.setdefault(_WAITED_IN_VAIN, item.name)
        os.environ[PATIENCE_VARIABLE] = "5"
    return (yield)


def _file_of(item: pytest.Item) -> pytest.File:
    file = item.getparent(pytest.File)
    assert file is not None
    return file


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever asks for the user's cache gets one of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QNNFARM_CACHE_DIR", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def plain_process() -> Iterator[None]:
    """Tests and their children start alike under any terminal, shell and umask.

    `nohup` and `&` ignore signals, which children would inherit. A run that is terminated ends its
    servers and devices as one that is interrupted does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.umask(0o022)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        for name in _APPEARANCE:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def new_port() -> Iterator[Callable[[], int]]:
    """Gives ports where nothing listens, and which no other test process is given meanwhile.

    An abstract socket reserves each: like ports, they belong to all users of a network namespace,
    and the kernel removes those of a process that has ended.
    """
    with contextlib.ExitStack() as reservations:

        def new() -> int:
            while True:
                port = free_port()
                reservation = reservations.enter_context(socket.socket(socket.AF_UNIX))
                with contextlib.suppress(OSError):
                    reservation.bind(f"\0qnnfarm-test-port-{port}")
                    return port

        yield new


@pytest.fixture(scope="session")
def adb_environment(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[Path]:
    """Points everything that reads the environment at private folders; gives their parent."""
    folder = tmp_path_factory.mktemp("adb")
    with private_environment(folder, new_port()):
        yield folder


@pytest.fixture(scope="session")
def adb_server(adb_environment: Path) -> Iterator[AdbServer]:
    """A real adb server that `ensure_server()` and child processes find."""
    server = ensure_server()
    yield server
    kill_server(server.address)


@pytest.fixture
def free_adb_port(new_port: Callable[[], int]) -> Iterator[int]:
    """A port for an adb server of a test's own; what runs there at the end is stopped."""
    port = new_port()
    yield port
    kill_server(ServerAddress("127.0.0.1", port))


def kill_server(address: ServerAddress) -> None:
    """End a server that a test has started, and wait until it is gone."""
    deadline = time.monotonic() + patience_s()
    while time.monotonic() < deadline:
        try:
            query(address, "host:kill", Deadline(30))
        except ServerUnreachable:
            return
        except Exception:  # noqa: BLE001, S110 - it may close before it answers
            pass
        time.sleep(0.02)
    raise TimeoutError(f"the adb server at {address} does not end")


@pytest.fixture(scope="session")
def virtual_device(adb_server: AdbServer) -> Iterator[Device]:
    """A virtual SM8750 that all tests of a worker share: they must leave it usable."""
    needs(VIRTUAL)
    from plugins.virtual_android import manager

    virtual = manager.start("shared", SOC)
    adb_server.connect(virtual.serial)
    yield Device(AdbTransport(adb_server, virtual.serial))
    manager.remove("shared")
    adb_server.disconnect(virtual.serial)


MakeDevice = Callable[..., "tuple[manager.VirtualDevice, Device]"]


@pytest.fixture
def make_virtual_device(adb_server: AdbServer) -> Iterator[MakeDevice]:
    """Makes devices that a test may break: `make_virtual_device(storage_bytes=...)`."""
    needs(VIRTUAL)
    from plugins.virtual_android import manager

    made: list[manager.VirtualDevice] = []

    def make(**options: Any) -> "tuple[manager.VirtualDevice, Device]":  # noqa: ANN401
        virtual = manager.start(f"t{secrets.token_hex(4)}", SOC, **options)
        made.append(virtual)
        adb_server.connect(virtual.serial)
        return virtual, Device(AdbTransport(adb_server, virtual.serial))

    yield make
    for virtual in made:
        manager.remove(virtual.name)
        adb_server.disconnect(virtual.serial)


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage cache for all xdist workers: what one builds, the others find."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "build-cache"


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder that one of the xdist workers fills and the others find filled."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            making = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(making, ignore_errors=True)  # of one that failed
            make(making)
            making.rename(folder)
    return folder


NewPostgresqlServer = Callable[[], AbstractContextManager[PostgresqlServer]]


@pytest.fixture(scope="session")
def new_postgresql_server(new_port: Callable[[], int], build_cache: Path) -> NewPostgresqlServer:
    """Starts servers, each for a block, on copies of a cluster that one of the workers makes."""

    def start() -> AbstractContextManager[PostgresqlServer]:
        cluster = made_once(build_cache.with_name("postgresql-cluster"), make_cluster)
        return running_postgresql_server(new_port, cluster=cluster)

    return start


@pytest.fixture(scope="session")
def postgresql_server(new_postgresql_server: NewPostgresqlServer) -> Iterator[PostgresqlServer]:
    """A server that the tests of a worker share, with a database `tests`."""
    with new_postgresql_server() as server:
        server.create("tests")
        yield server


def plan_reference(cache: Path, target: str) -> Build:
    """The build that the demo does: AR 1 and 32, context 192, two parts."""
    return builder_for(tiny_llama.folder(), cache, splits=2, target=target).plan()


@pytest.fixture(scope="session")
def genie_checks(build_cache: Path) -> Path:
    """A cache that knows what the installed Genie makes of dialogs of types `spd` and `lade`."""
    needs("libatomic1", "plugins.speculation")
    from plugins.speculation.genie_check import CHECKED, check_genie

    with FileLock(f"{build_cache}.genie.lock"):
        for kind in CHECKED:
            check_genie(kind, build_cache)
    return build_cache


@pytest.fixture(scope="session")
def reference_outputs(build_cache: Path) -> BuildOutputs:
    """The reference model built for the emulator of `SOC`, with the models of its stages."""
    needs("libatomic1")
    return plan_reference(build_cache, f"{SOC}:emulator").outputs()


@pytest.fixture(scope="session")
def outlier_model(build_cache: Path) -> Path:
    """The reference model with the outliers of real ones, a checkpoint."""
    return made_once(build_cache.with_name("outlier_llama"), outlier_llama.write)


@pytest.fixture(scope="session")
def encoder_model(build_cache: Path) -> Path:
    """The reference text encoder as an exporter leaves it."""
    needs("plugins.encoders")
    from plugins.encoders import tiny_encoder

    model: Path = tiny_encoder.write(build_cache.parent / tiny_encoder.NAME)
    return model  # typed without the plugin, too


@pytest.fixture(scope="session")
def encoder_bundle(encoder_model: Path, build_cache: Path) -> Path:
    """The container of the reference text encoder for the emulator, 64 tokens."""
    needs("libatomic1")
    builder = GenAIBuilderFactory.create(encoder_model, cache_root=build_cache)
    builder.set_targets([f"{SOC}:emulator"])
    builder.set_transformation_options({"arn_cl_options.context_length": (64,)})
    return builder.build().path


@pytest.fixture(scope="session")
def small_model(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of `small_bundle`: one layer, and text of a letter a token, three windows.

    Genie 1.21 answers wrongly where a row of the cache has 12 bytes: one head of 12, not two.
    """
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    folder = tmp_path_factory.mktemp("small") / "small_llama"
    model = make_checkpoint(folder, num_hidden_layers=1, **heads)
    (model / "text").mkdir()
    letters = (chr(0x100 + 2 + 97 * place % 298) for place in range(2 * 298))
    (model / "text" / "calibration.txt").write_text("".join(letters))
    return model


@pytest.fixture(scope="session")
def small_bundle(small_model: Path, build_cache: Path) -> Path:
    """A bundle of random weights in the shapes of `tiny_bundle`; a run takes a fifth of its time.

    For tests of what happens to a run, whatever is answered.
    """
    needs("libatomic1")
    return builder_for(small_model, build_cache).build().path


@pytest.fixture(scope="session")
def tiny_bundle(reference_outputs: BuildOutputs) -> Path:
    """The reference model's container for the emulator: a Genie bundle."""
    return reference_outputs.container
