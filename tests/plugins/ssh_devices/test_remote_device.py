"""`serial@host`: a virtual device at a second adb server, behind a real OpenSSH server."""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import ServerAddress
from harness.devices.adb.server import ensure_server, resolve_server
from harness.devices.device import Device
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import (
    AdbServerError,
    DeviceCommandError,
    DeviceLostError,
    HostUnreachableError,
    NoDeviceError,
)
from plugins.virtual_android import manager
from tests.conftest import kill_server
from tests.device_echo import echo_on
from tests.plugins.ssh_devices.ssh_server import SshServer, running_ssh_server


@dataclass
class Lab:
    """A host `board` with an adb server of its own, and a device that only that one knows."""

    ssh: SshServer
    server: AdbServer
    serial: str

    @property
    def spec(self) -> DeviceSpec:
        return DeviceSpec("android", f"{self.serial}@board")


@pytest.fixture(scope="module")
def lab(
    adb_environment: Path, tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    virtual = manager.start("faraway", "SM8650")
    address = ServerAddress("127.0.0.1", new_port())
    with running_ssh_server(folder, new_port()) as ssh:
        server = ensure_server(address)
        server.connect(virtual.serial)
        yield Lab(ssh, server, virtual.serial)
    manager.remove("faraway")
    kill_server(address)


@pytest.fixture
def devices(lab: Lab) -> Iterator[Devices]:
    port = {"board": lab.server.address.port}
    with Devices(ssh_config=lab.ssh.config, adb_ports=port) as devices:
        yield devices


@pytest.fixture
def device(lab: Lab, devices: Devices) -> Device:
    return devices.open(lab.spec)


def test_it_is_a_device_with_another_name(lab: Lab, device: Device) -> None:
    assert (device.serial, device.type) == (f"{lab.serial}@board", "android")
    found = device.properties()
    assert (found.serial, found.soc) == (f"{lab.serial}@board", "SM8650")
    assert device.shell("echo $1; cat", stdin=b"in").stdout == "\nin"
    with pytest.raises(DeviceCommandError, match=rf"{lab.serial}@board"):
        device.shell("exit 3")


def test_a_file_goes_through_the_tunnel_and_back(device: Device, tmp_path: Path) -> None:
    local = tmp_path / "file"
    local.write_bytes(os.urandom(3_000_000))
    remote = f"{device.work_root}/remote/it's"
    assert device.push(local, remote) == 3_000_000
    assert device.pull(remote, tmp_path / "back") == 3_000_000
    assert (tmp_path / "back").read_bytes() == local.read_bytes()


def test_a_port_of_the_device(lab: Lab, device: Device) -> None:
    with echo_on(device) as port:
        with (
            device.forward(f"tcp:{port}") as address,
            socket.create_connection(address, 120) as link,
        ):
            link.sendall(b"ping")
            assert link.recv(4) == b"ping"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)


def test_all_devices_of_a_host_share_a_connection(lab: Lab, devices: Devices) -> None:
    before = lab.ssh.log.read_text().count("Accepted publickey")
    first, second = devices.open(lab.spec), devices.open(lab.spec)
    assert first.boot_id() == second.boot_id()
    devices.open(DeviceSpec("linux", "board")).shell("true")
    assert lab.ssh.log.read_text().count("Accepted publickey") == before + 1


def test_it_comes_back_after_the_connection_was_lost(lab: Lab, device: Device) -> None:
    def drop(_data: bytes) -> None:
        lab.ssh.drop_connections()

    with pytest.raises((DeviceLostError, HostUnreachableError)):
        device.stream("echo here; sleep 60", on_output=drop, timeout_s=60)
    assert device.shell("echo again").stdout == "again\n"


def test_a_host_that_is_gone_is_not_taken_for_its_adb_server(lab: Lab, device: Device) -> None:
    assert device.shell("echo here").stdout == "here\n"
    lab.ssh.stop()
    try:
        with pytest.raises(HostUnreachableError, match="host board"):
            device.shell("true")
    finally:
        lab.ssh.start()
    assert device.shell("echo back").stdout == "back\n"


def test_a_serial_that_its_server_does_not_know(lab: Lab, devices: Devices) -> None:
    with pytest.raises(NoDeviceError, match="nobody"):
        devices.open(DeviceSpec("android", "nobody@board"))


def test_the_servers_are_left_running(lab: Lab, devices: Devices) -> None:
    devices.open(lab.spec)
    devices.close()
    assert [entry.serial for entry in resolve_server(lab.server.address).devices()] == [lab.serial]


def test_a_server_that_does_not_run_is_not_started(lab: Lab, new_port: Callable[[], int]) -> None:
    port = new_port()
    lab.ssh.configure(f"SetEnv ANDROID_ADB_SERVER_PORT={port}", host="idle")
    with (
        Devices(ssh_config=lab.ssh.config) as devices,
        pytest.raises(AdbServerError, match=rf"idle:{port} .*`adb start-server` on idle"),
    ):
        devices.open(DeviceSpec("android", "any@idle"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
