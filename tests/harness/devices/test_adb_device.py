"""A device behind the real adb server: commands, files, and what a device may refuse."""

import os
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
    DeviceTimeoutError,
    DeviceTransferError,
    NoDeviceError,
)
from plugins.virtual_android.manager import VirtualDevice

MakeDevice = Callable[..., tuple[VirtualDevice, Device]]


@pytest.fixture
def folder(virtual_device: Device) -> str:
    """An empty folder on the shared device."""
    base = os.path.dirname(virtual_device.work_root)  # noqa: PTH120 - a path of the device
    return virtual_device.shell(["mktemp", "-d", f"{base}/test-XXXXXX"]).stdout.strip()


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


def test_the_refused_one_of_many_is_named(
    virtual_device: Device, folder: str, tmp_path: Path
) -> None:
    local = tmp_path / "file"
    local.write_bytes(b"x" * 100_000)
    remotes = [f"{folder}/a", f"{folder}/a/below-a-file", f"{folder}/c"]
    with pytest.raises(DeviceTransferError) as caught:
        virtual_device.push_many(PushItem(local, remote) for remote in remotes)
    assert caught.value.path == remotes[1]


def test_a_device_that_never_was(adb_server: AdbServer) -> None:
    with pytest.raises(NoDeviceError, match=r"127\.0\.0\.1:1"):
        Device(AdbTransport(adb_server, "127.0.0.1:1")).shell("true")


def test_a_server_that_died_is_not_taken_for_a_device() -> None:
    with pytest.raises(AdbServerError, match="went away"):
        Device(AdbTransport(AdbServer(ServerAddress(port=1), 41), "any")).shell("true")
