"""`qnnfarm pool` as a user calls it."""

import contextlib
import json
import os
import secrets
import signal
import time
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.server import find_adb
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import LeaseLostError, RuntimeOutputError, UnknownVirtualDeviceError
from harness.pool.lease import Lease
from harness.pool.pool import Pool
from harness.pool.records import Facts
from harness.pool.requirement import Requirement
from plugins.virtual_android import manager
from tests import command_line
from tests.conftest import MakeDevice
from tests.harness.cli.conftest import Run


@pytest.fixture
def pool(qnnfarm: Run) -> Run:
    """Runs `qnnfarm pool ARGUMENT...` in a folder that has a `pool.yaml`."""
    return lambda *words: qnnfarm("pool", *words, COLUMNS="40")


@pytest.fixture
def pool_file(virtual_device: Device, tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    device = f"{{name: dut, type: android, identifier: '{virtual_device.serial}', tags: [t1]}}"
    path.write_text(f"devices: [{device}]")
    return path


def test_a_person_sees_who_holds_a_device_and_takes_it(
    pool: Run, pool_file: Path, virtual_device: Device
) -> None:
    with (
        Pool.of([DeviceSpec("android", virtual_device.serial)]) as own_pool,
        own_pool.acquire(Requirement(), timeout_s=60, purpose="a night run") as lease,
    ):
        done = pool("show", "--json")
        (shown,) = json.loads(done.stdout)
        assert (shown["name"], shown["state"], shown["token"]) == ("dut", "leased", lease.token)
        table = pool("show").stdout
        assert "a night run" in table
        assert "leased" in table
        done = pool("release", "dut", "--token", str(lease.token))
        assert (done.returncode, done.stderr) == (0, "released dut\n")
        with pytest.raises(LeaseLostError, match=r"\(pid \d+\) took it back, at \d\d:\d\d:\d\d"):
            _use(lease, times=600)  # its next heartbeat says so


def _use(lease: Lease, times: int) -> None:
    for _ in range(times):
        lease.device.shell("true")
        time.sleep(0.1)


def test_show_counts_what_speaks_against_a_device(
    pool: Run, pool_file: Path, virtual_device: Device
) -> None:
    with Pool.open(pool_file) as own_pool:
        for number in (1, 2):
            with own_pool.acquire(Requirement(), timeout_s=60) as lease:
                for part in ("first", "second"):
                    text = "and so on " * 40 + f"{part} of lease {number}"
                    lease.report(RuntimeOutputError(virtual_device.serial, text))
    lines = pool("show").stdout.splitlines()
    assert "2 of 3" in lines[1]
    newest, oldest = lines[2:]
    assert "first of lease 2" in newest
    assert "first of lease 1" in oldest
    (shown,) = json.loads(pool("show", "--json").stdout)
    assert (shown["weight"], shown["limit"], len(shown["failures"])) == (2, 3, 2)


def test_show_starts_nothing_and_repairs_nothing(
    pool: Run, adb_server: AdbServer, tmp_path: Path
) -> None:
    name = f"show-{secrets.token_hex(3)}"
    path = tmp_path / "pool.yaml"
    path.write_text(
        f"devices:\n- {{type: virtual, identifier: {name}, soc: SM8750}}\n"
        "- {name: usb, type: android, identifier: nobody}\n"
    )

    def shown() -> list[str]:
        states = [row["seen"] or row["state"] for row in json.loads(said("--json"))]
        text = said()
        assert all(state in text for state in states)
        return states

    def said(*words: str) -> str:
        return pool("show", *words).stdout

    try:
        assert shown() == ["not there", "not looked at yet"]
        assert pool("history", name).stdout == "nothing yet\n"
        assert pool("drain", "usb", "--reason", "x").stderr == "usb is draining\n"
        assert name not in [device.name for device in manager.list_devices()]
        assert pool("probe").returncode == 0
        assert shown() == ["ready", "draining"]
        pid = manager.get(name).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while manager.get(name).state == "running":
            time.sleep(0.05)
        assert shown() == ["stopped", "draining"]
        manager.remove(name)
        assert shown() == ["not there", "draining"]
        assert "made for its next lease" in said()
        assert pool("probe").returncode == 0
        assert shown() == ["ready", "draining"]
    finally:
        with contextlib.suppress(UnknownVirtualDeviceError):
            manager.remove(name)


def test_recover_says_each_step_as_it_begins(
    pool: Run, pool_file: Path, virtual_device: Device
) -> None:
    recovery = "recovery: {return_timeout_s: 0.5, steps: [reconnect, power_cycle]}"
    text = pool_file.read_text().replace(virtual_device.serial, "127.0.0.1:9")
    pool_file.write_text(f"{text}\n{recovery}")
    assert pool("drain", "dut", "--reason", "x").returncode == 0
    assert pool("undrain", "dut").stderr == "dut is absent\n"
    assert "not looked at yet" in pool("show").stdout
    with Pool.open(pool_file, probe=False) as own_pool:  # it was there once
        key = own_pool.ledger.keys_of(["android:127.0.0.1:9"])["android:127.0.0.1:9"]
        facts = Facts("SM8750", "v79")
        own_pool.ledger.record_found(key, "dut", "android:127.0.0.1:9", facts)
    done = pool("recover", "dut")
    assert done.returncode == 1
    asking, connecting, failed, cycling, not_taken, *_ = done.stderr.splitlines()
    assert asking == "asking whether it answers"
    trial = pool("unquarantine", "dut")
    assert trial.returncode == 2
    assert "it is not in quarantine: `qnnfarm pool recover dut` tries it now" in trial.stderr
    said = pool("history", "dut").stdout
    assert "recovery  " in said
    assert "recovery was asked for" in said
    assert "failed" not in [line.split("  ")[1] for line in said.splitlines()[1:]]
    assert connecting == "reconnect: connecting to it anew; then it has 0.5 s to answer"
    assert failed.startswith("reconnect: did not help: ")
    assert cycling.startswith("power_cycle: switching its power off and on, 60 s at most")
    assert not_taken.startswith("power_cycle: did not help: not taken: no command is configured")
    assert "`power_cycle` in pool.yaml" in not_taken


def test_drain_and_undrain(pool: Run, pool_file: Path) -> None:
    assert pool("probe").returncode == 0
    assert pool("drain", "dut", "--reason", "[red]swollen").returncode == 0
    assert "[red]swollen" in pool("show").stdout
    done = pool("recover", "dut")
    assert (done.returncode, done.stdout) == (2, "")
    assert "undrain it instead" in done.stderr
    assert pool("undrain", "dut").stderr == "dut is ready\n"
    told = ["asking whether it answers", "look: it answers", "dut is ready"]
    assert pool("recover", "dut").stderr.splitlines() == told
    assert "ready -> draining: [red]swollen" in pool("history", "dut").stdout


def test_a_person_holds_a_device_while_a_command_runs(
    pool: Run, pool_file: Path, virtual_device: Device
) -> None:
    words = ("pool", "lease", "--pool", pool_file, "--name", "dut", "--", "sh", "-c")
    said = 'echo "$QNNFARM_DEVICE $ANDROID_SERIAL"; exit 5'
    done = command_line.qnnfarm(*words, said)
    assert (done.returncode, done.stdout) == (5, f"dut {virtual_device.serial}\n"), done.stderr
    with command_line.Started(*words, "echo begun; exec sleep 300") as held:
        assert held.stdout.readline() == "begun\n"
        (shown,) = json.loads(pool("show", "--json").stdout)
        assert "sh -c echo begun" in shown["holder"]
        assert pool("release", "dut").returncode == 0
        assert "took it back" in held.stderr.read()
        assert held.wait() == 2


@pytest.fixture
def old_adb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `adb` whose shell ends as before version 35: a person reboots the device in it."""
    path, real = tmp_path / "bin" / "adb", find_adb()
    path.parent.mkdir()
    reboot = f"{real} shell 'reboot; sleep 60'; exit 0"
    path.write_text(f'#!/bin/sh\n[ "$1" = shell ] || exec {real} "$@"\n{reboot}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def test_a_shell_whose_device_goes_away_has_failed(
    make_virtual_device: MakeDevice, pool_file: Path, old_adb: Path, virtual_device: Device
) -> None:
    _, device = make_virtual_device()
    pool_file.write_text(pool_file.read_text().replace(virtual_device.serial, device.serial))
    words = ("pool", "lease", "--pool", pool_file, "--name", "dut")
    lost = "went away during {}: its connection ended"
    done = command_line.qnnfarm(*words)
    assert (done.returncode, lost.format("a shell") in done.stderr) == (2, True), done.stderr
    done = command_line.qnnfarm(*words, "--", "adb", "shell")
    assert (done.returncode, lost.format("adb shell") in done.stderr) == (0, True), done.stderr
    old_adb.write_text("#!/bin/sh\necho Android Debug Bridge version 1.0.39")
    done = command_line.qnnfarm(*words)
    assert (done.returncode, "would kill the server" in done.stderr) == (2, True), done.stderr


def test_a_person_reserves_a_device_and_another_waits(
    pool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "pool.yaml"
    path.write_text("devices: [{name: here, type: local}]")
    words = "reserve", "here", "--for", "2h", "--at", "2099-01-01 10:00"
    assert pool(*words).stderr.startswith("here is reserved by ")
    with Pool.open(path) as own_pool:
        own_pool.admin.reserve(["here"], 3600.0, by="ann")
    assert "reserved by ann from" in pool("show").stdout
    lease = "lease", "--wait", "0.5", "--", "true"
    done = pool(*lease)
    assert (done.returncode, "here is reserved by ann from" in done.stderr) == (2, True)
    done = pool("reserve", "here", "--for", "5m")
    assert (done.returncode, "qnnfarm pool unreserve 2" in done.stderr) == (2, True)
    assert pool("unreserve", "2").stderr.startswith("cancelled: ")
    assert pool(*lease).returncode == 0
    assert pool("unreserve", "2").returncode == 2
