"""Virtual devices as `adb` itself sees them."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import adbutils
import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.errors import DeviceLostError, UnknownVirtualDeviceError
from plugins.virtual_android import manager
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb, RunAndLose
from tests.private_adb import private_variables
from tests.waiting import patience_s, wait_for


def _start_server(home: Path, port: int) -> tuple[dict[str, str], subprocess.Popen[bytes]]:
    """An adb server that shares nothing with the user's; its environment and its process."""
    environment = {"PATH": os.environ["PATH"], **private_variables(home, port)}
    environment["ADB_SERVER_SOCKET"] = f"tcp:localhost:{port}"  # a server listens on that alone
    environment["ADB_LIBUSB"] = "0"  # for which it waits three seconds where there is no USB
    server = subprocess.Popen(
        [adbutils.adb_path(), "server", "nodaemon"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        assert server.poll() is None
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    wait_for(answers)
    return environment, server


@pytest.fixture(scope="session")
def new_adb_server(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[Callable[[], dict[str, str]]]:
    """Starts further adb servers, each with keys of its own; gives their environment."""
    servers: list[tuple[dict[str, str], subprocess.Popen[bytes]]] = []

    def start() -> dict[str, str]:
        servers.append(_start_server(tmp_path_factory.mktemp("home"), new_port()))
        return servers[-1][0]

    yield start
    for environment, server in servers:
        subprocess.run([adbutils.adb_path(), "kill-server"], env=environment, check=False)
        server.wait(timeout=patience_s())


@pytest.fixture(scope="session")
def adb(adb_server: AdbServer) -> Adb:
    """Runs `adb` as the user whose keys the devices accept."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [adbutils.adb_path(), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            timeout=patience_s(),
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def run_and_lose(adb_server: AdbServer) -> RunAndLose:
    """Runs a command that the device of a serial does not survive.

    By our own client: an `adb shell` of adb before 35 ends with 0 then.
    """

    def run(serial: str, script: str) -> None:
        with pytest.raises(DeviceLostError):
            Device(AdbTransport(adb_server, serial)).shell(script)

    return run


@pytest.fixture(scope="session")
def connect(adb: Adb) -> Callable[[str], None]:
    """Has the adb server connect to a device that listens; `adb` itself waits 10 s for it."""

    def connect(serial: str) -> None:
        wait_for(lambda: b"connected to" in adb("connect", serial).stdout)

    return connect


@pytest.fixture(scope="session")
def start_device(
    adb: Adb, connect: Callable[[str], None]
) -> Iterator[Callable[..., VirtualDevice]]:
    """Starts a device and connects the adb server to it; all are removed at the end."""
    started: list[VirtualDevice] = []

    def start(name: str, soc: str = "SM8750", **options: object) -> VirtualDevice:
        device = manager.start(name, soc, **options)  # type: ignore[arg-type]
        started.append(device)
        connect(device.serial)
        return device

    yield start
    for device in started:
        with contextlib.suppress(UnknownVirtualDeviceError):
            manager.remove(device.name)
        adb("disconnect", device.serial)


@pytest.fixture(scope="session")
def device(start_device: Callable[..., VirtualDevice]) -> VirtualDevice:
    """A running device, in the best namespace that this machine grants."""
    return start_device("shared-by-tests")


@pytest.fixture
def on_device(device: VirtualDevice, adb: Adb) -> Adb:
    """Runs `adb -s SERIAL` for `device`."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return adb("-s", device.serial, *arguments, stdin=stdin)

    return run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty state folder and home."""
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path
