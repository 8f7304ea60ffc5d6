"""Starting, finding and removing devices, without an adb server."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import BuildError
from harness.errors import UnknownVirtualDeviceError, VirtualDeviceError
from plugins.virtual_android import manager
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.folder import (
    make_folders,
    new_record,
    save_record,
)
from plugins.virtual_android.linux import process_stat
from plugins.virtual_android.namespace import NamespaceKind
from tests.command_line import Started
from tests.waiting import PATIENCE_S


def test_start_stop_and_remove(home: Path) -> None:
    started = manager.start("alpha", "sm8750")
    try:
        assert (started.name, started.soc, started.state) == ("alpha", "SM8750", "running")
        assert started.serial.startswith("127.0.0.1:")
        assert manager.start("alpha", "SM8750") == started
        assert manager.list_devices() == [started]
        stopped = manager.stop("alpha")
        assert (stopped.state, stopped.pid, stopped.serial) == ("stopped", None, started.serial)
        assert manager.stop("alpha") == stopped
        with pytest.raises(VirtualDeviceError, match="does not run"):
            manager.control("alpha").inject(parse_fault("drop"))
        again = manager.start("alpha", "SM8750")
        assert again.serial == started.serial
        assert again.pid != started.pid
    finally:
        manager.remove("alpha")
    assert manager.list_devices() == []
    assert [path for path in (home / "devices").iterdir() if path.suffix != ".lock"] == []


def test_two_starts_at_once_make_one_device(home: Path) -> None:
    code = "from plugins.virtual_android import manager; print(manager.start('twin', 'SM8750').pid)"

    starters = [Started("-c", code) for _ in range(3)]
    try:
        outputs = [process.communicate(timeout=PATIENCE_S) for process in starters]
        assert len({out for out, _ in outputs}) == 1, outputs
        assert outputs[0][0]
    finally:
        manager.remove("twin")


def test_a_process_that_is_not_the_devices_is_left_alone(home: Path) -> None:
    folder = home / "devices" / "stale"
    make_folders(folder)
    own = process_stat(os.getpid())
    assert own is not None
    record = new_record("stale", "SM8750", None).with_process(own.pid, 5555, NamespaceKind.NONE)
    save_record(folder, replace(record, pid_started=own.started - 1))
    assert manager.get("stale").state == "stopped"
    manager.stop("stale")
    save_record(folder, replace(record, machine_boot="another"))
    manager.remove("stale")


@given(st.text(max_size=50).filter(lambda name: not name.isascii() or not name.isalnum()))
def test_names_that_could_be_paths_are_refused(name: str) -> None:
    if manager._NAME.fullmatch(name):
        return
    for action in (manager.stop, manager.remove, manager.get):
        with pytest.raises(VirtualDeviceError):
            action(name)
    with pytest.raises(VirtualDeviceError):
        manager.start(name, "SM8750")


def test_unknown_names_are_errors(home: Path) -> None:
    for action in (manager.stop, manager.remove, manager.get):
        with pytest.raises(UnknownVirtualDeviceError) as caught:
            action("ghost")
        assert str(caught.value) == "no virtual device 'ghost': there are none yet"
    with pytest.raises(BuildError, match="unknown SoC"):
        manager.start("ghost", "SM9999")
    assert manager.list_devices() == []


def test_a_device_keeps_its_soc_and_may_change_its_size_while_stopped(home: Path) -> None:
    try:
        manager.start("fixed", "SM8750", storage_bytes=10_000_000)
        with pytest.raises(VirtualDeviceError, match="not SM8650"):
            manager.start("fixed", "SM8650")
        with pytest.raises(VirtualDeviceError, match="storage"):
            manager.start("fixed", "SM8750", storage_bytes=5)
        manager.stop("fixed")
        assert (
            manager.start("fixed", "SM8750", storage_bytes=20_000_000).storage_bytes == 20_000_000
        )
    finally:
        manager.remove("fixed")


def test_a_device_that_cannot_start_says_why(home: Path) -> None:
    folder = home / "devices" / "broken"
    make_folders(folder)
    save_record(folder, new_record("broken", "SM8750", None))
    (folder / "root" / "properties" / "a-folder").mkdir(parents=True)
    with pytest.raises(VirtualDeviceError, match="did not start") as caught:
        manager.start("broken", "SM8750")
    assert "\n" not in str(caught.value)
    assert manager.get("broken").state == "stopped"
    manager.remove("broken")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1, "name": 3}', '{"version": 1}', "\0",
     *(f'{{"version": 1, "name": "hurt", "soc": "SM8750", "serial_number": "QF1", {value}}}'
       for value in ('"port": 70000', '"port": -1', '"namespace": "moon"'))],
)  # fmt: skip
def test_a_damaged_record_is_an_error_that_can_be_removed(home: Path, content: str) -> None:
    folder = home / "devices" / "hurt"
    folder.mkdir(parents=True)
    (folder / "device.json").write_text(content)
    with pytest.raises(VirtualDeviceError, match="record of"):
        manager.stop("hurt")
    assert [device.state for device in manager.list_devices()] == ["damaged"]
    manager.remove("hurt")
    assert not folder.exists()
