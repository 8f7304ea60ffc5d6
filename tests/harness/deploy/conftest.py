"""What the tests of deployment share."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.deploy.deploy import remove_run
from harness.devices.adb.client import AdbServer
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from tests.tcp_meter import TcpMeter

if TYPE_CHECKING:
    from plugins.virtual_android.manager import VirtualDevice


@pytest.fixture
def run_id(virtual_device: Device) -> Iterator[str]:
    """A new run on the shared device, removed afterwards."""
    name = f"run-{secrets.token_hex(6)}"
    yield name
    remove_run(virtual_device, name)


@pytest.fixture
def random_file(tmp_path: Path) -> Callable[[int], Path]:
    """Makes files whose contents no device can hold already."""

    def make(size: int) -> Path:
        path = tmp_path / secrets.token_hex(6)
        path.write_bytes(os.urandom(size))
        return path

    return make


@pytest.fixture
def metered(
    adb_server: AdbServer, make_virtual_device: Callable[..., "tuple[VirtualDevice, Device]"]
) -> Iterator[tuple[Device, TcpMeter]]:
    """A device of the test's own, and what counts the bytes between it and the adb server."""
    virtual, _ = make_virtual_device()
    host, _, port = virtual.serial.rpartition(":")
    adb_server.disconnect(virtual.serial)
    with TcpMeter((host, int(port))) as meter:
        serial = f"127.0.0.1:{meter.port}"
        adb_server.connect(serial)
        yield Device(AdbTransport(adb_server, serial)), meter
        adb_server.disconnect(serial)
