"""Asking all devices at once."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.devices import inventory
from harness.devices.adb.client import AdbDeviceInfo, AdbServer
from harness.devices.adb.connection import ServerAddress
from harness.devices.device import Device
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import DeviceCommandError, DeviceConnectError
from plugins.virtual_android import manager
from tests.conftest import MakeDevice

if TYPE_CHECKING:
    from tests.plugins.ssh_devices.ssh_server import SshServer


def test_every_type_with_its_state(
    ssh_board: "SshServer", virtual_device: Device, opened: Devices
) -> None:
    texts = [virtual_device.serial, "linux:board", "local", "absent", "x@board", "virtual:x"]
    specs = [DeviceSpec.parse(text) for text in texts]
    found = inventory.named(opened, specs, timeout_s=120)
    assert [str(one.spec) for one in found] == [
        f"android:{virtual_device.serial}", "linux:board", "local", "android:absent",
        "android:x@board", "virtual:x",
    ]  # fmt: skip
    states = [one.state for one in found]
    assert states[:4] == ["device", "device", "device", "absent"]
    assert [one.properties is not None for one in found[:3]] == [True] * 3
    assert found[0].properties is not None
    assert found[0].properties.soc == "SM8750"
    assert all(one.error.isprintable() for one in found)
    assert all(one.error for one in found[3:])


def test_a_server_that_forgot_the_running_devices_is_connected_to_them(
    adb_server: AdbServer, make_virtual_device: MakeDevice
) -> None:
    virtual, _ = make_virtual_device()
    stopped, _ = make_virtual_device()
    manager.stop(stopped.name)
    for serial in (virtual.serial, stopped.serial):
        adb_server.disconnect(serial)
    with Devices() as devices:
        found = {str(one.spec): one for one in inventory.all_of(devices, timeout_s=120)}
    assert found[f"virtual:{virtual.name}"].properties is not None
    assert f"virtual:{stopped.name}" not in found
    assert manager.get(stopped.name).state == "stopped"


class _Listing(AdbServer):
    def devices(self) -> list[AdbDeviceInfo]:
        return [
            AdbDeviceInfo("????", "no permissions"),
            AdbDeviceInfo("\x1b[2J", "off\x07line"),
            AdbDeviceInfo("R58", "unauthorized"),
        ]


def test_serials_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))  # no virtual devices to connect to
    monkeypatch.setattr(Devices, "adb_server", lambda _: _Listing(ServerAddress(port=1), 41))
    with Devices() as devices:
        found = inventory.all_of(devices)
    assert [(one.spec is None, one.state) for one in found] == [
        (True, "no permissions"), (True, "off line"), (False, "unauthorized"),
    ]  # fmt: skip
    assert all(one.serial.isprintable() and one.error.isprintable() for one in found)


def test_one_that_hangs_does_not_hang_the_others(ssh_board: "SshServer", tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as links:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    links.enter_context(silent.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        config = tmp_path / "config"
        config.write_text(
            ssh_board.config.read_text()
            + f"Host hung\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n"
            "  ConnectTimeout 1\n"
        )
        try:
            with Devices(ssh_config=config) as devices:
                hung = [DeviceSpec("android", f"d{number}@hung") for number in range(8)]
                board = DeviceSpec("linux", "board")
                found = inventory.named(devices, [*hung, board])
        finally:
            silent.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert [one.state for one in found] == ["unreachable"] * 8 + ["device"]


def test_a_virtual_device_is_opened_by_its_name_or_its_port(adb_server: AdbServer) -> None:
    serial = manager.start("latecomer", "SM8750").serial
    spec = DeviceSpec("virtual", "latecomer")
    try:
        with Devices() as devices:
            by_port = devices.open(DeviceSpec("android", serial))
            assert by_port.shell("echo here").stdout == "here\n"
            device = devices.open(spec)
            assert (device.type, device.serial) == ("virtual", "virtual:latecomer")
            with pytest.raises(DeviceCommandError, match=f"^device {spec}: '?false"):
                device.shell("false")
            assert devices.open(spec) is device
            devices.forget(spec)
            manager.stop("latecomer")
            with pytest.raises(DeviceConnectError, match=f"{spec}: it is stopped; `qnnfarm device"):
                devices.open(spec)
            assert devices.open(spec, start=True).shell("echo there").stdout == "there\n"
    finally:
        manager.remove("latecomer")
        adb_server.disconnect(serial)
