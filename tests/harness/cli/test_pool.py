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
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import LeaseLostError, RuntimeOutputError, UnknownVirtualDeviceError
from harness.pool.lease import Lease
from harness.pool.pool import Pool
from harness.pool.records import Facts
from harness.pool.requirement import Requirement
from harness.virtual_device import manager
from tests import command_line


def qnnfarm(pool_file: Path, *words: str) -> command_line.Done:
    environment = {**os.environ, "COLUMNS": "40"}
    return command_line.qnnfarm("pool", *words, "--pool", pool_file, env=environment)


@pytest.fixture
def pool_file(virtual_device: Device, tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    device = f"{{name: dut, type: android, identifier: '{virtual_device.serial}', tags: [t1]}}"
    path.write_text(f"devices: [{device}]")
    return path


def test_a_person_sees_who_holds_a_device_and_takes_it(
    pool_file: Path, virtual_device: Device
) -> None:
    with (
        Pool.of([DeviceSpec("android", virtual_device.serial)]) as pool,
        pool.acquire(Requirement(), timeout_s=60, purpose="a night run") as lease,
    ):
        done = qnnfarm(pool_file, "show", "--json")
        (shown,) = json.loads(done.stdout)
        assert (shown["name"], shown["state"], shown["token"]) == ("dut", "leased", lease.token)
        table = qnnfarm(pool_file, "show").stdout
        assert "a night run" in table
        assert "leased" in table
        done = qnnfarm(pool_file, "release", "dut", "--token", str(lease.token))
        assert (done.returncode, done.stderr) == (0, "released dut\n")
        with pytest.raises(LeaseLostError, match=r"\(pid \d+\) took it back, at \d\d:\d\d:\d\d"):
            _use(lease, times=600)  # its next heartbeat says so


def _use(lease: Lease, times: int) -> None:
    for _ in range(times):
        lease.device.shell("true")
        time.sleep(0.1)


def test_show_counts_what_speaks_against_a_device(pool_file: Path, virtual_device: Device) -> None:
    with Pool.open(pool_file) as pool:
        for number in (1, 2):
            with pool.acquire(Requirement(), timeout_s=60) as lease:
                for part in ("first", "second"):
                    text = "and so on " * 40 + f"{part} of lease {number}"
                    lease.report(RuntimeOutputError(virtual_device.serial, text))
    lines = qnnfarm(pool_file, "show").stdout.splitlines()
    assert "2 of 3" in lines[1]
    newest, oldest = lines[2:]
    assert "first of lease 2" in newest
    assert "first of lease 1" in oldest
    (shown,) = json.loads(qnnfarm(pool_file, "show", "--json").stdout)
    assert (shown["weight"], shown["limit"], len(shown["failures"])) == (2, 3, 2)


def test_show_starts_nothing_and_repairs_nothing(adb_server: AdbServer, tmp_path: Path) -> None:
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
        return qnnfarm(path, "show", *words).stdout

    try:
        assert shown() == ["not there", "not looked at yet"]
        assert qnnfarm(path, "history", name).stdout == "nothing yet\n"
        assert qnnfarm(path, "drain", "usb", "--reason", "x").stderr == "usb is draining\n"
        assert name not in [device.name for device in manager.list_devices()]
        assert qnnfarm(path, "probe").returncode == 0
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
        assert qnnfarm(path, "probe").returncode == 0
        assert shown() == ["ready", "draining"]
    finally:
        with contextlib.suppress(UnknownVirtualDeviceError):
            manager.remove(name)


def test_history_has_old_events_counted_by_day(pool_file: Path) -> None:
    assert qnnfarm(pool_file, "probe").returncode == 0
    with Pool.open(pool_file, probe=False) as pool:
        (key,) = pool.ledger.keys_of([str(m.spec) for m in pool.members()]).values()
        for _ in range(700):
            pool.ledger.add_history(key, "tried", "again")
    day, *events = json.loads(qnnfarm(pool_file, "history", "dut", "--json").stdout)
    assert (day["what"], events[0]["period"]) == ("day", "")
    assert day["counts"]["tried"] + len(events) == 700
    shown = qnnfarm(pool_file, "history", "dut").stdout.splitlines()[1].split()
    assert shown[:2] == [day["period"], "day"]
    assert shown[-2:] == ["tried", str(day["counts"]["tried"])]
    (alone,) = json.loads(qnnfarm(pool_file, "history", "dut", "--days", "0", "--json").stdout)
    assert alone == day


def test_recover_says_each_step_as_it_begins(pool_file: Path, virtual_device: Device) -> None:
    recovery = "recovery: {return_timeout_s: 0.5, steps: [reconnect, power_cycle]}"
    text = pool_file.read_text().replace(virtual_device.serial, "127.0.0.1:9")
    pool_file.write_text(f"{text}\n{recovery}")
    assert qnnfarm(pool_file, "drain", "dut", "--reason", "x").returncode == 0
    assert qnnfarm(pool_file, "undrain", "dut").stderr == "dut is absent\n"
    assert "not looked at yet" in qnnfarm(pool_file, "show").stdout
    with Pool.open(pool_file, probe=False) as pool:  # it was there once
        key = pool.ledger.keys_of(["android:127.0.0.1:9"])["android:127.0.0.1:9"]
        facts = Facts("SM8750", "v79")
        pool.ledger.record_found(key, "dut", "android:127.0.0.1:9", facts)
    done = qnnfarm(pool_file, "recover", "dut")
    assert done.returncode == 1
    asking, connecting, failed, cycling, not_taken, *_ = done.stderr.splitlines()
    assert asking == "asking whether it answers"
    trial = qnnfarm(pool_file, "unquarantine", "dut")
    assert trial.returncode == 2
    assert "it is not in quarantine: `qnnfarm pool recover dut` tries it now" in trial.stderr
    said = qnnfarm(pool_file, "history", "dut").stdout
    assert "recovery  " in said
    assert "recovery was asked for" in said
    assert "failed" not in [line.split("  ")[1] for line in said.splitlines()[1:]]
    assert connecting == "reconnect: connecting to it anew; then it has 0.5 s to answer"
    assert failed.startswith("reconnect: did not help: ")
    assert cycling.startswith("power_cycle: switching its power off and on, 60 s at most")
    assert not_taken.startswith("power_cycle: did not help: not taken: no command is configured")
    assert "`python -m tools.map_hub`" in not_taken


def test_drain_and_undrain(pool_file: Path) -> None:
    assert qnnfarm(pool_file, "probe").returncode == 0
    assert qnnfarm(pool_file, "drain", "dut", "--reason", "[red]swollen").returncode == 0
    assert "[red]swollen" in qnnfarm(pool_file, "show").stdout
    done = qnnfarm(pool_file, "recover", "dut")
    assert (done.returncode, done.stdout) == (2, "")
    assert "undrain it instead" in done.stderr
    assert qnnfarm(pool_file, "undrain", "dut").stderr == "dut is ready\n"
    told = ["asking whether it answers", "look: it answers", "dut is ready"]
    assert qnnfarm(pool_file, "recover", "dut").stderr.splitlines() == told
    assert "ready -> draining: [red]swollen" in qnnfarm(pool_file, "history", "dut").stdout


def test_errors_are_one_line(pool_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("devices:\n  - {type: phone}\n")
    for file, words in ((bad, ["show"]), (pool_file, ["undrain", "nobody"])):
        done = qnnfarm(file, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("qnnfarm: ")
        assert done.stderr.count("\n") == 1


def test_a_person_holds_a_device_while_a_command_runs(
    pool_file: Path, virtual_device: Device
) -> None:
    words = ("pool", "lease", "--pool", pool_file, "--name", "dut", "--", "sh", "-c")
    said = 'echo "$QNNFARM_DEVICE $ANDROID_SERIAL"; exit 5'
    done = command_line.qnnfarm(*words, said)
    assert (done.returncode, done.stdout) == (5, f"dut {virtual_device.serial}\n"), done.stderr
    with command_line.Started(*words, "echo begun; exec sleep 300") as held:
        assert held.stdout.readline() == "begun\n"
        (shown,) = json.loads(qnnfarm(pool_file, "show", "--json").stdout)
        assert "sh -c echo begun" in shown["holder"]
        assert qnnfarm(pool_file, "release", "dut").returncode == 0
        assert "took it back" in held.stderr.read()
        assert held.wait() == 2


def test_a_person_reserves_a_device_and_another_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "pool.yaml"
    path.write_text("devices: [{name: here, type: local}]")
    words = "reserve", "here", "--for", "2h", "--at", "2099-01-01 10:00"
    assert qnnfarm(path, *words).stderr.startswith("here is reserved by ")
    with Pool.open(path) as pool:
        pool.admin.reserve(["here"], 3600.0, by="ann")
    assert "reserved by ann from" in qnnfarm(path, "show").stdout
    lease = "pool", "lease", "--pool", path, "--wait", "0.5", "--", "true"
    done = command_line.qnnfarm(*lease)
    assert (done.returncode, "here is reserved by ann from" in done.stderr) == (2, True)
    done = qnnfarm(path, "reserve", "here", "--for", "5m")
    assert (done.returncode, "qnnfarm pool unreserve 2" in done.stderr) == (2, True)
    assert qnnfarm(path, "unreserve", "2").stderr.startswith("cancelled: ")
    assert command_line.qnnfarm(*lease).returncode == 0
    assert qnnfarm(path, "unreserve", "2").returncode == 2
