"""A device behind the real adb server: commands, files, and what a device may refuse."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import ServerAddress
from harness.devices.adb.transport import AdbTransport
from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import (
    AdbServerError,
    DeviceCommandError,
    DeviceFullError,
    DeviceTimeoutError,
    DeviceTransferError,
    HostFileError,
    NoDeviceError,
)
from harness.virtual_device.manager import VirtualDevice

MakeDevice = Callable[..., tuple[VirtualDevice, Device]]

_HOSTILE = 'it\'s "a" $(name) `of` -ü\u202e 漢字,0644'


@pytest.fixture
def folder(virtual_device: Device) -> str:
    """An empty folder on the shared device."""
    base = os.path.dirname(virtual_device.work_root)  # noqa: PTH120 - a path of the device
    return virtual_device.shell(["mktemp", "-d", f"{base}/test-XXXXXX"]).stdout.strip()


def test_it_is_a_device(virtual_device: Device) -> None:
    device: Device = virtual_device
    assert device.work_root.endswith("/qnnfarm")


def test_streams_status_and_input(virtual_device: Device) -> None:
    result = virtual_device.shell("cat; echo err >&2; exit 7", stdin=b"in\n", check=False)
    assert (result.exit_status, result.stdout, result.stderr) == (7, "in\n", "err\n")


def test_much_input_and_output(virtual_device: Device) -> None:
    data = b"0123456789abcdef" * 200_000
    result = virtual_device.shell("cat", stdin=data, timeout_s=60)
    assert result.stdout.encode() == data
    cut = virtual_device.shell("cat", stdin=data, timeout_s=60, max_output=100)
    assert len(cut.stdout) < 200
    assert f"{len(data) - 100} bytes left out" in cut.stdout


def test_words_need_no_quoting(virtual_device: Device) -> None:
    words = ["", "a b", "*", "~", "$HOME", _HOSTILE, "\n", "-n"]
    output = virtual_device.shell(["printf", "<%s>", *words]).stdout
    assert output == "".join(f"<{word}>" for word in words)
    assert virtual_device.shell('printf %s "$V"', env={"V": _HOSTILE}).stdout == _HOSTILE


def test_a_failure_carries_everything(virtual_device: Device) -> None:
    with pytest.raises(DeviceCommandError, match="status 3: broken") as caught:
        virtual_device.shell("echo noise; echo broken >&2; exit 3")
    error = caught.value
    assert (error.serial, error.exit_status) == (virtual_device.serial, 3)
    assert error.log_tail == "broken\n"
    assert "exit 3" in error.command


def test_a_timeout_is_over_all(virtual_device: Device) -> None:
    """Counted from each piece of output, it would never be over."""
    for timeout_s in (0.5, 4.0, 32.0):  # as long as the machine takes for two pieces
        with pytest.raises(DeviceTimeoutError, match=rf" {timeout_s:g} s") as caught:
            virtual_device.shell("while :; do echo .; sleep 0.1; done", timeout_s=timeout_s)
        assert caught.value.timeout_s == timeout_s
        if "s; last output: . ." in str(caught.value):
            return
    pytest.fail("the output is not told")


def test_a_command_too_long_to_be_sent(virtual_device: Device) -> None:
    with pytest.raises(DeviceTransferError, match="65535 are possible"):
        virtual_device.shell("true " + "x" * 70_000)


def test_properties(virtual_device: Device) -> None:
    found = virtual_device.properties()
    assert (found.serial, found.soc, found.hexagon) == (virtual_device.serial, "SM8750", "v79")
    assert (found.abi, found.emulator) == ("x86_64", True)
    assert found.hardware_serial
    assert found.free_bytes is not None
    assert found.free_bytes > 1 << 20


def test_many_files_in_one_go(virtual_device: Device, folder: str, tmp_path: Path) -> None:
    items = []
    for number in range(200):
        local = tmp_path / str(number)
        local.write_text("x" * number)
        items.append(PushItem(local, f"{folder}/{number}"))
    assert virtual_device.push_many(items) == sum(range(200))
    assert virtual_device.shell(f"ls {folder} | wc -l").stdout.strip() == "200"


def test_refused_transfers_leave_nothing(
    virtual_device: Device, folder: str, tmp_path: Path
) -> None:
    local = tmp_path / "file"
    local.write_bytes(b"x" * 2_000_000)
    with pytest.raises(DeviceTransferError) as caught:
        virtual_device.push(local, folder)
    assert caught.value.path == folder
    back = tmp_path / "back"
    with pytest.raises(DeviceTransferError):
        virtual_device.pull(f"{folder}/absent", back)
    assert list(tmp_path.iterdir()) == [local]


def test_the_refused_one_of_many_is_named(
    virtual_device: Device, folder: str, tmp_path: Path
) -> None:
    local = tmp_path / "file"
    local.write_bytes(b"x" * 100_000)
    remotes = [f"{folder}/a", f"{folder}/a/below-a-file", f"{folder}/c"]
    with pytest.raises(DeviceTransferError) as caught:
        virtual_device.push_many(PushItem(local, remote) for remote in remotes)
    assert caught.value.path == remotes[1]


def test_files_of_the_host_that_cannot_be_sent(virtual_device: Device, tmp_path: Path) -> None:
    with pytest.raises(HostFileError, match="No such file"):
        virtual_device.push(tmp_path / "absent", "/x")
    with pytest.raises(HostFileError, match="not a regular file"):
        virtual_device.push(tmp_path, "/x")


def test_a_device_that_never_was(adb_server: AdbServer) -> None:
    with pytest.raises(NoDeviceError, match=r"127\.0\.0\.1:1"):
        Device(AdbTransport(adb_server, "127.0.0.1:1")).shell("true")


def test_a_server_that_died_is_not_taken_for_a_device() -> None:
    with pytest.raises(AdbServerError, match="went away"):
        Device(AdbTransport(AdbServer(ServerAddress(port=1), 41), "any")).shell("true")


def test_threads_share_a_device(virtual_device: Device) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = virtual_device.shell(f"echo {number}").stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"{number}\n" for number in range(8)}


def test_a_full_device_refuses_a_push(make_virtual_device: MakeDevice, tmp_path: Path) -> None:
    _, device = make_virtual_device(storage_bytes=4 << 20)
    local = tmp_path / "file"
    local.write_bytes(b"x" * (8 << 20))
    base = os.path.dirname(device.work_root)  # noqa: PTH120 - a path of the device
    with pytest.raises(DeviceFullError) as caught:
        device.push(local, f"{base}/file")
    assert caught.value.path == f"{base}/file"
