"""Devices that go away, and devices that do not let us in."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.devices import device as device_module
from harness.devices.adb import transport as adb_transport
from harness.devices.adb.client import AdbServer
from harness.devices.adb.discovery import open_device
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.errors import DeviceLostError, DeviceTimeoutError, DeviceUnauthorizedError
from plugins.virtual_android import manager
from plugins.virtual_android.faults import ALWAYS, Stall
from plugins.virtual_android.manager import VirtualDevice

MakeDevice = Callable[..., tuple[VirtualDevice, Device]]


def test_in_the_middle_of_a_command(make_virtual_device: MakeDevice) -> None:
    virtual, device = make_virtual_device()

    def stop(_output: bytes) -> None:
        manager.stop(virtual.name)

    with pytest.raises(DeviceLostError, match="went away during `echo here; sleep 3600`"):
        device.stream("echo here; sleep 3600", on_output=stop, timeout_s=3600)
    with pytest.raises(DeviceLostError):
        device.shell("true")
    with pytest.raises(DeviceLostError):
        device.reboot(timeout_s=30)


def test_in_the_middle_of_a_push(make_virtual_device: MakeDevice, tmp_path: Path) -> None:
    virtual, device = make_virtual_device()
    (tmp_path / "big").touch()
    os.truncate(tmp_path / "big", 256 << 20)
    remote, sent = f"{device.work_root}/big", list[int]()

    def stop(count: int) -> None:
        sent.append(count)
        if len(sent) == 1:
            manager.stop(virtual.name)

    with pytest.raises(DeviceLostError, match="went away during push of big"):
        device.push(tmp_path / "big", remote, timeout_s=3600, on_progress=stop)
    assert sent


def test_one_that_stopped_to_answer_is_asked_once_before_the_next_command(
    make_virtual_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual, device = make_virtual_device()
    control = manager.control(virtual.name)
    control.inject(Stall(when="shell", count=ALWAYS))
    monkeypatch.setattr(device_module, "_KILL_TIMEOUT_S", 0.1)
    with pytest.raises(DeviceTimeoutError, match="true"):
        device.shell("true", timeout_s=0.5)
    with monkeypatch.context() as short:
        short.setattr(device_module, "_SILENT_S", 0.5)
        with pytest.raises(DeviceTimeoutError, match=r"killing what ran.* 0\.5 s"):
            device.shell("true", timeout_s=3600)
    control.clear()
    assert device.shell("echo back", timeout_s=200).stdout == "back\n"


def test_a_push_that_makes_no_progress_ends_before_its_deadline(
    make_virtual_device: MakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual, device = make_virtual_device()
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    control = manager.control(virtual.name)
    control.inject(Stall(when="push", count=ALWAYS))
    monkeypatch.setattr(adb_transport, "_STALL_S", 0.5)
    with pytest.raises(DeviceTimeoutError, match=r"progress of the push of file .* 0\.5 s"):
        device.push(tmp_path / "file", "/data/local/tmp/file", timeout_s=3600)
    control.clear()
    monkeypatch.setattr(device_module, "_SILENT_S", 200.0)
    assert device.shell("echo here", timeout_s=200).stdout == "here\n"


def test_one_that_knows_another_key(
    adb_server: AdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as stranger:
        stranger.setenv("HOME", str(tmp_path))
        virtual = manager.start("stranger", "SM8750")
    try:
        with pytest.raises(DeviceUnauthorizedError, match="does not accept"):
            adb_server.connect(virtual.serial)
        known = {entry.serial for entry in adb_server.devices()}
        if virtual.serial in known:
            with pytest.raises(DeviceUnauthorizedError):
                open_device(virtual.serial)
            with pytest.raises(DeviceUnauthorizedError):
                Device(AdbTransport(adb_server, virtual.serial)).shell("true")
    finally:
        manager.remove("stranger")
        adb_server.disconnect(virtual.serial)
