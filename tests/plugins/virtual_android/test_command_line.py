"""`qnnfarm device fault`, `heat` and `power`, from the command line."""

import json
from collections.abc import Callable

from plugins.virtual_android import manager
from plugins.virtual_android.manager import VirtualDevice
from tests.command_line import Done, qnnfarm


def _qnnfarm(*arguments: str) -> Done:
    return qnnfarm("device", *arguments)


def test_faults_are_injected_listed_and_cleared(start_device: Callable[..., VirtualDevice]) -> None:
    started = _qnnfarm("start", "told", "--fault", "drop:bytes=5,when=pull")
    try:
        assert started.returncode == 0, started.stderr
        assert started.stderr.startswith("started told (SM8750), files in ")
        again = _qnnfarm("start", "told")
        assert again.stderr.startswith("told (SM8750) is already running, files in ")
        assert again.stdout == started.stdout
        assert json.loads(_qnnfarm("start", "told", "--json").stdout)["started"] is False
        more = ["slow:ms=1", "corrupt:file=2,count=always"]
        listed = _qnnfarm("fault", "told", *more)
        assert listed.stdout.splitlines() == ["drop:bytes=5,when=pull", *more]
        assert json.loads(_qnnfarm("fault", "told", "--clear", "--json").stdout) == []
        events = json.loads(_qnnfarm("fault", "told", "--events", "--json").stdout)
        assert [event["kind"] for event in events] == ["booted", *["armed"] * 3, *["cleared"] * 3]
        wrong = _qnnfarm("fault", "told", "melt")
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "known are drop" in wrong.stderr
        assert manager.control("told").faults() == ()
    finally:
        manager.remove("told")
    gone = _qnnfarm("fault", "told", "drop")
    assert gone.returncode == 2
    assert "no virtual device 'told'" in gone.stderr


def test_heat_is_switched_on_read_and_off(device: VirtualDevice) -> None:
    assert "is off" in _qnnfarm("heat", device.name).stderr
    hot = _qnnfarm("heat", device.name, "--ambient", "35", "--temperature", "60", "--battery", "50")
    assert "SoC 6" in hot.stdout or "SoC 59" in hot.stdout
    assert "battery 50%" in hot.stdout
    reading = json.loads(_qnnfarm("heat", device.name, "--json").stdout)
    assert 50 < reading["soc_c"] <= 60
    wrong = _qnnfarm("heat", device.name, "--battery", "150")
    assert wrong.returncode == 2
    assert "battery" in wrong.stderr
    assert _qnnfarm("heat", device.name, "--off").returncode == 0
    assert manager.control(device.name).heat() is None


def test_several_devices_stop_at_once_or_none(start_device: Callable[..., VirtualDevice]) -> None:
    first, second = start_device("stop-a"), start_device("stop-b", unconfined=True)
    again = _qnnfarm("start", second.name)
    assert "stop-b is unconfined: its shell may do on this host" in again.stderr
    assert "nobody" in _qnnfarm("stop", first.name, "nobody").stderr
    assert "--all" in _qnnfarm("stop").stderr
    assert manager.get(first.name).state == "running"
    stopped = _qnnfarm("stop", first.name, second.name)
    assert stopped.stderr.splitlines() == [f"stopped {one.name}" for one in (first, second)]
    assert {manager.get(one.name).state for one in (first, second)} == {"stopped"}
