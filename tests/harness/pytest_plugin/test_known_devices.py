"""A device that nobody knows ends the session before a test waits for it."""

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError, NoDeviceError, UnknownVirtualDeviceError
from harness.pool.pool import Pool
from harness.pytest_plugin.leases import check_known
from plugins.virtual_android import manager
from tests.conftest import MakeDevice
from tests.harness.pytest_plugin.conftest import Farm

_TESTS = """
def test_before(): print("it ran")

def test_needs_it(device): print("it ran")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("device", "words", "runs"),
    [
        ("nothere", "no adb device 'nothere'", ["-n0"]),
        pytest.param("nothere", "no adb device 'nothere'", ["-n1"], marks=pytest.mark.variant),
        # What was looked for once is not known from then on. Of no other test: a pool may know it.
        ("127.0.0.1:7", "127.0.0.1:7", ["-n0", "-n0"]),
        ("virtual:nothere", "no virtual device 'nothere'", ["-n0"]),
    ],
)
def test_it_is_wrong_use_in_one_line(farm: Farm, device: str, words: str, runs: list[str]) -> None:
    for workers in runs:
        done = farm(_TESTS, "-s", f"--device={device}", workers)
        told = done.output
        assert done.returncode == pytest.ExitCode.USAGE_ERROR, told
        (line,) = [text for text in told.splitlines() if text.startswith("ERROR: --device: ")]
        assert words in line
        assert "it ran" not in told
        assert "Traceback" not in told
        assert "INTERNALERROR" not in told


def test_tests_without_devices_do_not_ask(farm: Farm) -> None:
    done = farm(_TESTS, "-s", "--device=virtual:nothere", "-k", "before", "-n0")
    assert done.returncode == 0, done.output
    assert "it ran" in done.output


def test_one_of_an_ini_file_fails_the_tests_that_need_it(
    farm: Farm, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nqnnfarm_devices = virtual:nothere\n")
    done = farm(_TESTS, "-s", "-n0")
    assert "1 passed, 1 error" in done.output, done.output
    assert "UnknownVirtualDeviceError: no virtual device 'nothere'" in done.output


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
