"""A device that nobody knows ends the session before a test waits for it."""

import os
import subprocess
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError, NoDeviceError, UnknownVirtualDeviceError
from harness.pool.pool import Pool
from harness.pytest_plugin.leases import check_known
from harness.virtual_device import manager
from tests.conftest import MakeDevice
from tests.harness.pytest_plugin.conftest import command

_TESTS = """
def test_before(): print("it ran")

def test_needs_it(device): print("it ran")
"""
_PATIENCE_S = 250


def _run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_it.py").write_text(_TESTS)
    return subprocess.run(
        command(folder, "-s", *arguments), cwd=folder, env=os.environ.copy(),
        capture_output=True, text=True, timeout=_PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("device", "words", "runs"),
    [
        ("nothere", "no adb device 'nothere'", ["-n2"]),
        # What was looked for once is not known from then on. Of no other test: a pool may know it.
        ("127.0.0.1:7", "127.0.0.1:7", ["-pno:xdist", "-pno:xdist"]),
        ("virtual:nothere", "no virtual device 'nothere'", ["-pno:xdist"]),
    ],
)
def test_it_is_wrong_use_in_one_line(
    tmp_path: Path, adb_server: AdbServer, device: str, words: str, runs: list[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for workers in runs:
        done = _run(tmp_path, f"--device={device}", workers)
        told = done.stdout + done.stderr
        assert done.returncode == pytest.ExitCode.USAGE_ERROR, told
        (line,) = [text for text in told.splitlines() if text.startswith("ERROR: --device: ")]
        assert words in line
        assert "it ran" not in told
        assert "Traceback" not in told
        assert "INTERNALERROR" not in told


def test_tests_without_devices_do_not_ask(tmp_path: Path, adb_server: AdbServer) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = _run(tmp_path, "--device=virtual:nothere", "-k", "before", "-pno:xdist")
    assert done.returncode == 0, done.stdout
    assert "it ran" in done.stdout


def test_one_of_an_ini_file_fails_the_tests_that_need_it(
    tmp_path: Path, adb_server: AdbServer
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nqnnfarm_devices = virtual:nothere\n")
    done = _run(tmp_path, "-pno:xdist")
    assert "1 passed, 1 error" in done.stdout, done.stdout
    assert "UnknownVirtualDeviceError: no virtual device 'nothere'" in done.stdout


def test_what_was_met_once_is_known_while_it_is_away(
    adb_server: AdbServer, make_virtual_device: MakeDevice
) -> None:
    virtual, _ = make_virtual_device()
    by_serial = DeviceSpec("android", virtual.serial)
    by_name = DeviceSpec("virtual", virtual.name)
    with Pool.of([by_serial]):
        pass
    manager.stop(virtual.name)
    adb_server.disconnect(virtual.serial)
    check_known([by_serial, by_name, DeviceSpec("local")])


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (DeviceSpec("android", "nothere"), NoDeviceError),
        (DeviceSpec("virtual", "nothere"), UnknownVirtualDeviceError),
        (DeviceSpec("linux", "nothere.invalid"), HarnessError),
        (DeviceSpec("android", "serial@nothere.invalid"), HarnessError),
    ],
)
def test_what_a_pool_looked_for_in_vain_is_not_known(
    adb_server: AdbServer, spec: DeviceSpec, error: type[HarnessError]
) -> None:
    with Pool.of([spec]):
        pass
    with pytest.raises(error):
        check_known([spec])


def test_what_is_drained_is_known(adb_server: AdbServer, make_virtual_device: MakeDevice) -> None:
    virtual, _ = make_virtual_device()
    spec = DeviceSpec("android", virtual.serial)
    with Pool.of([spec]) as pool:
        pool.admin.drain(spec.identifier, "a new battery")
        manager.stop(virtual.name)
        adb_server.disconnect(virtual.serial)
        check_known([spec])
