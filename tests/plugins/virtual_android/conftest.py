"""Virtual devices as `adb` itself sees them."""

import contextlib
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
from tests.waiting import patience_s, wait_for


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
    def run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return adb("-s", device.serial, *arguments, stdin=stdin)

    return run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path
