"""Devices of every type: behind the real adb server, behind a real OpenSSH server, this machine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.devices.device import Device
from harness.devices.devices import Devices
from harness.devices.local import LocalTransport
from harness.devices.spec import DeviceSpec
from tests.system import needs

if TYPE_CHECKING:
    from tests.plugins.ssh_devices.ssh_server import SshServer

KINDS = ("android", "linux", "local")


@pytest.fixture(scope="session")
def ssh_board(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> "Iterator[SshServer]":
    """A server that all tests of a worker share: host `board`, with a home of its own."""
    needs("plugins.ssh_devices")
    from tests.plugins.ssh_devices.ssh_server import running_ssh_server

    folder = tmp_path_factory.mktemp("ssh")
    home = folder / "home"
    home.mkdir()
    with running_ssh_server(folder, new_port(), {"HOME": str(home)}) as server:
        yield server


@pytest.fixture(scope="session")
def opened(ssh_board: "SshServer") -> Iterator[Devices]:
    with Devices(ssh_config=ssh_board.config) as devices:
        yield devices


@pytest.fixture(scope="session", params=KINDS)
def any_device(
    request: pytest.FixtureRequest,
    opened: Devices,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Device]:
    """One of each type, which all tests of a worker share: they must leave it usable."""
    if request.param == "android":
        serial = request.getfixturevalue("virtual_device").serial
        yield opened.open(DeviceSpec("android", serial))
    elif request.param == "linux":
        yield opened.open(DeviceSpec("linux", "board"))
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("local")))
            device = Device(LocalTransport())
            assert device.work_root  # found while the variable is set
        yield device


@pytest.fixture
def any_folder(any_device: Device) -> str:
    """An empty folder on the device."""
    any_device.shell(["mkdir", "-p", any_device.work_root])
    return any_device.shell(["mktemp", "-d", f"{any_device.work_root}/test-XXXXXX"]).stdout.strip()


@pytest.fixture
def local_folder(tmp_path: Path) -> Path:
    """An empty folder of this host."""
    folder = tmp_path / "local"
    folder.mkdir()
    return folder
