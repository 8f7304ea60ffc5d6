"""`qnnfarm devices`, as a process."""

from pathlib import Path

from harness.cli.devices import _holders
from harness.devices.adb.client import AdbServer
from harness.devices.device import Device
from harness.devices.inventory import Sighting
from harness.devices.spec import DeviceSpec
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from plugins.virtual_android import manager
from tests.harness.cli.conftest import Run


def test_a_virtual_device_has_its_name_and_no_list_starts_one(
    qnnfarm: Run, adb_server: AdbServer, virtual_device: Device
) -> None:
    adb_server.disconnect(virtual_device.serial)  # as after the adb server was restarted
    manager.start("resting", "SM8750")
    manager.stop("resting")
    try:
        listed = qnnfarm("devices")
        assert listed.returncode == 0, listed.stderr
        line = next(line for line in listed.stdout.splitlines() if "virtual:shared" in line)
        assert line.split()[:3] == ["virtual:shared", virtual_device.serial, "device"]
        assert "resting" not in listed.stdout
        named = qnnfarm("devices", "virtual:resting")
        assert named.returncode == 1
        assert "it is stopped; `qnnfarm device start resting` starts it" in named.stdout
        assert manager.get("resting").state == "stopped"
    finally:
        manager.remove("resting")


def test_a_device_that_is_listed_twice_hides_no_holder(adb_environment: Path) -> None:
    local = DeviceSpec("local")
    twin = Sighting(DeviceSpec("android", "X1"), "X1", "offline")
    with Pool.of([local]) as pool, pool.acquire(Requirement(), timeout_s=200, purpose="a bench"):
        holders = _holders([twin, twin, Sighting(local, "local", "device")])
    assert "a bench" in holders["local"]
