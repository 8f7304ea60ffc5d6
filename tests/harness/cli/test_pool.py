"""`qnnfarm pool` as a user calls it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.devices.adb import AdbDevice
from harness.devices.spec import DeviceSpec
from harness.errors import LeaseLostError
from harness.pool.base import Requirement
from harness.pool.lease import Lease
from harness.pool.pool import Pool


def qnnfarm(pool_file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "pool", *words, "--pool", str(pool_file)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )


@pytest.fixture
def pool_file(virtual_device: AdbDevice, tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    device = f"{{name: dut, type: android, identifier: '{virtual_device.serial}', tags: [t1]}}"
    path.write_text(f"devices: [{device}]")
    return path


def test_a_person_sees_who_holds_a_device_and_takes_it(
    pool_file: Path, virtual_device: AdbDevice
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
        with pytest.raises(LeaseLostError):  # its next heartbeat says so
            _use(lease, times=600)


def _use(lease: Lease, times: int) -> None:
    for _ in range(times):
        lease.device.shell("true")
        time.sleep(0.1)


def test_drain_and_undrain(pool_file: Path) -> None:
    assert qnnfarm(pool_file, "drain", "dut", "--reason", "[red]swollen").returncode == 0
    assert "[red]swollen" in qnnfarm(pool_file, "show").stdout
    done = qnnfarm(pool_file, "recover", "dut")
    assert (done.returncode, done.stdout) == (2, "")
    assert "undrain it instead" in done.stderr
    assert qnnfarm(pool_file, "undrain", "dut").stderr == "dut is ready\n"
    assert qnnfarm(pool_file, "recover", "dut").stderr == "dut is ready\n"
    assert "ready -> draining: [red]swollen" in qnnfarm(pool_file, "history", "dut").stdout


def test_errors_are_one_line(pool_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("devices:\n  - {type: phone}\n")
    for file, words in ((bad, ["show"]), (pool_file, ["undrain", "nobody"])):
        done = qnnfarm(file, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("qnnfarm: ")
        assert done.stderr.count("\n") == 1
