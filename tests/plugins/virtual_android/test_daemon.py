"""The process of a device: its port, neighbours, leftovers after `kill -9`, and log sizes."""

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import VirtualDeviceError
from plugins.virtual_android import events, folder, manager, outside
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.host import hosted_control, hosted_devices
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb, RunAndLose, new_marker, running
from tests.waiting import is_alive, wait_for


def _port(serial: str) -> int:
    return int(serial.rpartition(":")[2])


# Its port


@pytest.mark.parametrize("when", ["power", pytest.param("reboot", marks=pytest.mark.variant)])
def test_the_port_of_a_device_that_is_off_stays_taken(
    start_device: Callable[..., VirtualDevice], adb: Adb, run_and_lose: RunAndLose, when: str
) -> None:
    device = start_device(f"off-{when}")
    fault = "power:off=inf,when=shell" if when == "power" else "reboot:when=shell"
    manager.control(device.name).inject(parse_fault(fault))
    run_and_lose(device.serial, "sleep 60")
    wait_for(lambda: not _accepts(device.serial))
    # The listener was closed; the port is taken again a moment later.
    wait_for(lambda: not any(_can_have(_port(device.serial), share=one) for one in (False, True)))
    if when == "power":
        manager.control(device.name).power_on()
    wait_for(lambda: b"connected" in adb("connect", device.serial).stdout)
    wait_for(lambda: adb("-s", device.serial, "shell", "echo back").stdout == b"back\n")
    manager.remove(device.name)


def _accepts(serial: str) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", _port(serial)), timeout=5).close()
        return True
    return False


def _can_have(port: int, *, share: bool) -> bool:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, share)
        try:
            thief.bind(("127.0.0.1", port))
            thief.listen()
        except OSError:
            return False
        return True


# Its neighbours


def test_a_device_that_fails_spares_its_neighbours(
    tmp_path: Path, adb: Adb, connect: Callable[[str], None]
) -> None:
    with hosted_devices(2, "SM8750", tmp_path, processes=1, unconfined=True) as [first, second]:
        for serial in (first, second):
            connect(serial)
        (tmp_path / "h000" / "root" / "properties" / "a-folder").mkdir()
        adb("-s", first, "shell", "reboot; sleep 60")
        commands = hosted_control(tmp_path, 0)
        wait_for(lambda: commands.events()[-1].detail.startswith("failed: "))
        time.sleep(0.5)
        assert adb("-s", second, "shell", "echo here").stdout == b"here\n"
    for serial in (first, second):
        adb("disconnect", serial)


def test_two_processes_do_not_serve_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LOCK_PATIENCE_S", 0.1)
    lock = folder.lock_folder(tmp_path)
    with pytest.raises(OSError, match="another process serves this device"):
        folder.lock_folder(tmp_path)
    os.close(lock)


# Processes that it left


def test_leftovers_of_a_killed_device_are_killed_at_its_next_start(
    start_device: Callable[..., VirtualDevice], adb: Adb
) -> None:
    device = start_device("phoenix", unconfined=True)
    marker = new_marker()
    adb("-s", device.serial, "shell", f"setsid sleep {marker} </dev/null >/dev/null 2>&1 &")
    wait_for(lambda: len(running(marker)) == 1)
    assert device.pid is not None
    os.kill(device.pid, signal.SIGKILL)
    wait_for(lambda: manager.get("phoenix").state == "stopped")
    assert running(marker)
    start_device("phoenix", unconfined=True)
    assert not running(marker)
    manager.remove("phoenix")


def test_a_damaged_record_does_not_hide_a_process(home: Path) -> None:
    device = manager.start("hurt", "SM8750")
    (home / "devices" / "hurt" / "device.json").write_text("{")
    manager.remove("hurt")
    assert not running(str(home / "devices" / "hurt"))
    assert device.pid is not None
    assert not is_alive(device.pid)


def test_an_unrecorded_daemon_is_replaced(home: Path) -> None:
    """Its starter was killed between the start and the record."""
    first = manager.start("lost", "SM8750")
    file = home / "devices" / "lost" / "device.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": None}))
    try:
        again = manager.start("lost", "SM8750")
        assert first.pid is not None
        assert not is_alive(first.pid)
        assert again.pid != first.pid
    finally:
        manager.remove("lost")


def test_a_start_that_takes_too_long_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_START_PATIENCE_S", 0.001)
    try:
        with pytest.raises(VirtualDeviceError, match="no answer"):
            manager.start("slow", "SM8750")
    finally:
        manager.remove("slow")


# What grows


def test_the_event_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_BYTES", 4000)
    file = events.EventFile(tmp_path)
    log = events.EventLog(file.write, lambda _: None)
    for number in range(200):
        log.add("armed", f"drop:bytes={number}")
    file.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 4000 < sum(sizes) < 9000
    kept = [event.fault for event in events.read_events(tmp_path)]
    assert kept == [f"drop:bytes={number}" for number in range(200 - len(kept), 200)]


def test_the_log_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("a") as stream:
        handler = outside.BoundedHandler(stream)
        for number in range(9000):
            text = f"{number} {'x' * 1000}"
            handler.handle(logging.LogRecord("log", logging.INFO, "", 0, text, (), None))
    lines = path.read_text().splitlines()
    assert path.stat().st_size <= 4 << 20
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == list(range(9000 - len(numbers), 9000))
    assert len(numbers) > 1500
