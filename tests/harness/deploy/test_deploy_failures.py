"""Deployments that cannot be finished leave no bad content behind, and say why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.clock import Deadline
from harness.deploy import scripts
from harness.deploy.deploy import deploy, store_usage
from harness.deploy.scripts import ensure_scripts
from harness.devices.adb.client import AdbServer
from harness.devices.adb.transport import AdbTransport
from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceFullError,
    DeviceLostError,
    DeviceTimeoutError,
)
from plugins.virtual_android import manager
from plugins.virtual_android.faults import ALWAYS, Full, Stall
from plugins.virtual_android.manager import VirtualDevice

RandomFile = Callable[[int], Path]
MakeDevice = Callable[..., tuple[VirtualDevice, Device]]


def test_a_device_that_goes_away_and_comes_back(
    adb_server: AdbServer, make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    virtual, device = make_virtual_device()
    files = {f"part {n}": random_file(12 << 20) for n in range(3)}
    gone = False

    def stop(sent: int, total: int) -> None:
        nonlocal gone
        if sent > total // 2 and not gone:
            gone = True
            manager.stop(virtual.name)

    with pytest.raises(DeviceLostError) as caught:
        deploy(device, files, run_id="r", timeout_s=1200, on_progress=stop)
    assert caught.value.serial == virtual.serial

    back = manager.start(virtual.name, virtual.soc)
    adb_server.connect(back.serial)
    again = Device(AdbTransport(adb_server, back.serial))
    deployment = deploy(again, files, run_id="r", timeout_s=1200)
    assert 0 < deployment.pushed_bytes <= 2 * (12 << 20)
    for file in deployment.files:
        found = again.shell(["sha256sum", f"{deployment.run_dir}/{file.name}"], timeout_s=60)
        assert found.stdout.startswith(file.sha256)


def test_a_device_without_room_is_not_pushed_to(
    make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    _, device = make_virtual_device(storage_bytes=32 << 20)
    with pytest.raises(DeviceFullError, match=r"bytes needed.*free.* 0 evictable") as caught:
        deploy(device, {"big": random_file(40 << 20)}, run_id="r")
    error = caught.value
    assert error.evictable_bytes == 0
    assert error.needed_bytes is not None
    assert error.free_bytes is not None
    assert error.free_bytes < error.needed_bytes
    assert store_usage(device).entries == ()
    deploy(device, {"small": random_file(1 << 20)}, run_id="r")


def test_a_device_that_fills_up_meanwhile(
    make_virtual_device: MakeDevice, random_file: RandomFile
) -> None:
    _, device = make_virtual_device(storage_bytes=40 << 20)
    kept = {"kept": random_file(1 << 20)}
    deploy(device, kept, run_id="r0")
    files = {"first": random_file(17 << 20), "second": random_file(10 << 20)}
    filler = random_file(20 << 20)

    def fill(sent: int, _total: int) -> None:
        if sent == 17 << 20:
            device.push(filler, f"{device.work_root}/filler")

    with pytest.raises(DeviceFullError):
        deploy(device, files, run_id="r", on_progress=fill)
    assert device.shell(f"ls -A {device.work_root}/incoming").stdout == ""
    assert deploy(device, kept, run_id="r2").pushed_bytes == 0


def test_a_device_that_takes_or_answers_nothing(
    make_virtual_device: MakeDevice, random_file: RandomFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full one has no numbers that nobody knows; a silent one ends it long before its limit."""
    virtual, device = make_virtual_device()
    deploy(device, {"z": random_file(10)}, run_id="before")
    control = manager.control(virtual.name)
    control.inject(Full(free=40))
    with pytest.raises(DeviceFullError) as caught:
        deploy(device, {"a": random_file(10)}, run_id="r")
    assert caught.value.needed_bytes is None
    assert str(caught.value).endswith(f"is full at {device.work_root}: remove files from it")
    assert "\n" not in str(caught.value)
    control.clear()
    control.inject(Stall(when="shell", count=ALWAYS))
    monkeypatch.setattr(scripts, "STEP_S", 0.5)
    monkeypatch.setattr("harness.devices.device._KILL_TIMEOUT_S", 0.2)
    with pytest.raises(DeviceTimeoutError, match=r"0\.\d+ s"):
        deploy(device, {"a": random_file(10)}, run_id="r", timeout_s=3600)


def test_bytes_that_change_on_the_way(
    virtual_device: Device, random_file: RandomFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = random_file(10_000), random_file(10_000)
    real = Device.push_many

    def swapped(self: Device, items: list[PushItem], **options: float) -> int:
        changed = [PushItem(other if i.local == file else i.local, i.remote) for i in items]
        return real(self, changed, timeout_s=options["timeout_s"])

    with monkeypatch.context() as cable:
        cable.setattr(Device, "push_many", swapped)
        with pytest.raises(DeploymentCorruptError) as caught:
            deploy(virtual_device, {"a": file}, run_id="bad-cable")
    error = caught.value
    held = {entry.sha256 for entry in store_usage(virtual_device).entries}
    assert not held & {error.expected, error.found}
    assert len(error.found) == 64
    assert virtual_device.shell(f"ls -A {virtual_device.work_root}/incoming").stdout == ""


def test_scripts_that_do_not_arrive_leave_nothing(make_virtual_device: MakeDevice) -> None:
    virtual, device = make_virtual_device()
    manager.control(virtual.name).inject(Full(free=4096))
    with pytest.raises(DeviceFullError):
        ensure_scripts(device, Deadline.for_device(device.serial, "scripts", 60))
    assert device.shell(f"ls -A {device.work_root}/incoming").stdout == ""
    manager.control(virtual.name).clear()
    folder = ensure_scripts(device, Deadline.for_device(device.serial, "scripts", 60))
    assert device.shell(["ls", "-A", f"{device.work_root}/scripts"]).stdout.split() == [
        folder[-16:]
    ]
