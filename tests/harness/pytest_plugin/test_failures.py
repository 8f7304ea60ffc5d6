"""What goes wrong in the middle: a device that is lost, a runner that crashes, Ctrl-C."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.pool.pool import Pool
from harness.pool.states import MemberState
from harness.pytest_plugin.hooks import pytest_report_teststatus
from harness.pytest_plugin.terminal import LOST
from tests.conftest import MakeDevice
from tests.harness.pytest_plugin.conftest import Farm, command

pytestmark = pytest.mark.timeout(600)

_LOSES = """
from plugins.virtual_android import manager

used = []

def test_loses_its_device(device):
    used.append(device.member)
    manager.stop(device.member)
    device.shell(["echo", "hello"])

def test_goes_on_with_another(device):
    used.append(device.member)
    assert device.shell(["echo", "hello"]).stdout == "hello\\n"
    assert used[0] != used[1]
"""


_HANGS = """
def test_hangs(device):
    device.shell("sleep 79", timeout_s=0.5)

def test_other(device):
    device.shell(["true"])
"""


def test_a_test_that_fails_alike_on_two_devices_is_told_so(
    farm: Farm, two_devices: tuple[str, str]
) -> None:
    fault = "the test is at fault, not the devices"
    for first, name in zip((True, False), two_devices, strict=True):
        outcome = farm(_HANGS, f"--device=virtual:{name}")
        assert outcome.counts() == {"tests": 2, "failures": 1}, outcome.output
        assert (fault in outcome.output) is not first
    assert f"it fails alike on {two_devices[0]}" in outcome.output
    with Pool.of([DeviceSpec("virtual", name) for name in two_devices]) as pool:
        assert [member.failures for member in pool.members()] == [(), ()]


def test_a_lost_device_is_an_error_and_the_next_test_gets_another(
    farm: Farm, make_virtual_device: MakeDevice
) -> None:
    names = [make_virtual_device()[0].name for _ in range(2)]
    outcome = farm(_LOSES, *[f"--device=virtual:{name}" for name in names], "-v")
    assert " 1 passed, 1 error in " in outcome.output
    assert outcome.counts() == {"tests": 2, "errors": 1}
    with Pool.of([DeviceSpec("virtual", name) for name in names]) as pool:
        (left,) = (member for member in pool.members() if member.state is MemberState.READY)
    assert left.holder == ""
    assert "DEVICE LOST" in outcome.output
    assert "ERROR at call of test_loses_its_device" in outcome.output
    assert "at setup of" not in outcome.output
    (error,) = outcome.cases()["test_loses_its_device"].iter("error")
    assert error.attrib["message"].startswith('lost its device on call with "')
    assert "naming.py" not in (error.text or "") + outcome.output  # the frame that words it
    assert "contextlib.py" not in (error.text or "") + outcome.output
    properties = outcome.properties("test_loses_its_device")
    assert properties["qnnfarm.device"] in properties["qnnfarm.failure"]
    assert properties["qnnfarm.failure"].startswith("DeviceLostError: ")
    assert "qnnfarm.evidence" not in properties  # it cannot be asked


def test_a_report_of_a_rerun_is_no_error() -> None:
    report = pytest.TestReport("x", ("x", 1, "x"), {}, "failed", None, "call")
    setattr(report, LOST, True)
    assert pytest_report_teststatus(report) == ("error", "E", "DEVICE LOST")
    report.outcome = "rerun"  # type: ignore[assignment] # as pytest-rerunfailures has it
    assert pytest_report_teststatus(report) is None


def test_a_failed_command_shows_the_code_of_the_test_alone(
    farm: Farm, two_devices: tuple[str, str]
) -> None:
    text = "def test_it(device):\n    device.shell('false')\n"
    outcome = farm(text, f"--device=virtual:{two_devices[0]}")
    assert "device.shell('false')" in outcome.output
    assert "lease.py" not in outcome.output
    assert "beginning of main" not in outcome.output


_TAKEN = """
import threading
import time

def take(pool, device):
    device.unleased.shell("until [ -e $TMPDIR/begun ]; do sleep 0.05; done; rm $TMPDIR/begun")
    pool.admin.release(device.member)
    pool.acquire(REQUIREMENT, timeout_s=60).release()

from harness.pool.requirement import Requirement
REQUIREMENT = Requirement()

def test_command(device, pool):
    threading.Thread(target=take, args=(pool, device)).start()
    device.shell(": >$TMPDIR/begun; sleep 50", timeout_s=100)

def test_whatever_fails(device, pool):
    pool.admin.release(device.member)
    assert device.serial == "x"

def test_next(device):
    assert device.shell("echo here").stdout.strip() == "here"
"""


def test_a_lease_that_was_taken_is_an_error_of_the_lease(
    farm: Farm, make_virtual_device: MakeDevice
) -> None:
    name = make_virtual_device()[0].name
    outcome = farm(_TAKEN, f"--device=virtual:{name}", "-v")
    assert outcome.counts() == {"tests": 3, "errors": 2}, outcome.output
    for test in ("test_command", "test_whatever_fails"):
        told = outcome.properties(test)["qnnfarm.failure"]
        assert told.startswith("LeaseLostError: ")
        assert "took it back, at " in told
    with Pool.of([DeviceSpec("virtual", name)]) as pool:
        assert pool.members()[0].failures == ()


_ACCUSES = """
import pytest
from harness.errors import DeviceLostError, HostUnreachableError, RunnerError

def test_runner(device):
    raise RunnerError(device.serial, "genie", "crashed", 139, "log")

def test_behind_another_error(device):
    try:
        raise DeviceLostError(device.serial, "push", "gone")
    except DeviceLostError as error:
        raise ValueError("no data") from error

def test_host_in_between(device):
    raise HostUnreachableError("board", "no answer")

def test_expected(device):
    with pytest.raises(DeviceLostError):
        raise DeviceLostError(device.serial, "push", "gone")

def test_own_mistake(device):
    assert device.serial == "x"
"""


def test_evidence_goes_to_the_pool(farm: Farm, make_virtual_device: MakeDevice) -> None:
    name = make_virtual_device()[0].name
    outcome = farm(_ACCUSES, f"--device=virtual:{name}")
    assert outcome.counts() == {"tests": 5, "failures": 2, "errors": 2}, outcome.output
    assert "qnnfarm.failure" not in outcome.properties("test_expected")
    between = outcome.properties("test_host_in_between")["qnnfarm.failure"]
    assert between.startswith("HostUnreachableError: ")
    with Pool.of([DeviceSpec("virtual", name)]) as pool:
        told = [entry.what for entry in pool.history(name)]
        assert [what for what in told if what.startswith("counted")] == [
            "counted: RunnerError",
            "counted: DeviceLostError",
        ]  # a host's failure adds nothing
        assert pool.members()[0].weight == 0  # a test ended well after them
    assert "qnnfarm.failure" not in outcome.properties("test_own_mistake")
    assert Path(outcome.properties("test_runner")["qnnfarm.evidence"]).is_dir()


_WAITS = """
def test_runs_for_ever(device):
    device.shell("echo $$ > $TMPDIR/plugin-pid; sleep 600 & sleep 600", timeout_s=700)
"""


def test_an_interrupt_leaves_the_device_clean(
    tmp_path: Path, adb_server: AdbServer, make_virtual_device: MakeDevice
) -> None:
    virtual, device = make_virtual_device()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(_WAITS)
    spec = DeviceSpec("virtual", virtual.name)
    process = subprocess.Popen(
        command(tmp_path, f"--device={spec}"),
        cwd=tmp_path, env=os.environ.copy(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        device.shell("until [ -s $TMPDIR/plugin-pid ]; do sleep 0.1; done", timeout_s=200)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=250)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "KeyboardInterrupt" in output
    assert "INTERNALERROR" not in output
    assert _sleepers(device) == ""
    with Pool.of([spec]) as pool:
        (member,) = pool.members()
        assert (member.state, member.holder) == (MemberState.READY, "")


def _sleepers(device: Device) -> str:
    """What still sleeps in the session of that command."""
    script = "p=$(cat $TMPDIR/plugin-pid); for s in /proc/[0-9]*/stat; do cat $s 2>/dev/null; done"
    lines = device.shell(f"{script} | grep -w $p || true").stdout
    alive = (line for line in lines.splitlines() if "(sleep) Z" not in line)
    return "\n".join(line for line in alive if "(sleep)" in line)
