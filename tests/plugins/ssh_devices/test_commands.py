"""Commands on boards and on devices behind hosts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli.device_lease import lease_device
from harness.devices.adb.client import AdbServer
from harness.devices.device import Device
from tests.harness.cli.conftest import Run
from tests.plugins.ssh_devices.ssh_server import running_ssh_server


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


def test_a_host_is_connected_to_once(
    adb_environment: Path,
    tmp_path: Path,
    new_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / ".ssh").mkdir()
    with running_ssh_server(tmp_path / ".ssh", new_port()) as board:
        monkeypatch.setenv("HOME", str(tmp_path))
        with lease_device("linux:board", wait_s=60, purpose="") as device:
            assert device.shell(["echo", "here"]).stdout == "here\n"
    assert board.log.read_text().count("Accepted publickey") == 1
