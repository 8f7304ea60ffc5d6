"""`qnnfarm devices`, as a process."""

import json
from collections.abc import Callable
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
from tests.ssh_server import running_ssh_server


def test_devices_of_every_type(
    qnnfarm: Run,
    adb_server: AdbServer,
    virtual_device: Device,
    tmp_path: Path,
    new_port: Callable[[], int],
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    with running_ssh_server(home / ".ssh", new_port(), {"HOME": str(home)}) as server:
        server.configure(f"SetEnv ANDROID_ADB_SERVER_PORT={adb_server.address.port}", host="farm")
        server.configure(f"SetEnv ANDROID_ADB_SERVER_PORT={new_port()}", host="idle")
        serial = virtual_device.serial
        farm, absent = f"{serial}@farm", ("R58@idle", "virtual:nobody")
        asked = (serial, farm, "linux:board", "local", "virtual:shared", *absent)
        done = qnnfarm("devices", *asked, "--json", HOME=str(home))
        assert done.returncode == 1, done.stderr  # two that were named do not answer
        rows = json.loads(done.stdout)
        assert [row["state"] for row in rows] == [*["device"] * 5, "unreachable", "absent"]
        assert [row["device"] for row in rows] == [
            f"android:{serial}", f"android:{farm}", "linux:board", "local",
            "virtual:shared", "android:R58@idle", "virtual:nobody",
        ]  # fmt: skip
        assert [row.get("soc") for row in rows[:2]] == ["SM8750", "SM8750"]
        assert rows[1]["serial"] == farm
        assert rows[1]["hexagon"] == "v79"
        assert "adb start-server" in rows[5]["error"]
        table = qnnfarm("devices", farm, "R58@idle", HOME=str(home))
        assert table.returncode == 1, table.stderr
        for words in (farm, "SM8750 v79", "Android", "unreachable", "R58@idle: adb"):
            assert words in table.stdout


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
