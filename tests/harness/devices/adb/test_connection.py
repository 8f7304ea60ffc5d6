"""Connections to a real adb server whose time is over, or whose user interrupts, at any point."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.clock import Deadline
from harness.devices.adb.client import AdbServer, device_features
from harness.devices.adb.connection import open_service, query
from harness.devices.adb.transport import ShellSession, SyncSession
from harness.devices.device import Device
from tests.striking import FAILURES, EndsAt, recorded_links

Use = Callable[[AdbServer, str, Deadline], object]


def _by_query(server: AdbServer, serial: str, deadline: Deadline) -> None:
    assert query(server.address, "host:version", deadline) == "0029"
    assert "shell_v2" in device_features(server, serial, deadline)


def _by_shell(server: AdbServer, serial: str, deadline: Deadline) -> None:
    with open_service(server.address, serial, "shell,v2,raw:cat", deadline) as connection:
        assert ShellSession(connection, io.BytesIO(), io.BytesIO()).run(b"in") == 0


def _by_sync(server: AdbServer, serial: str, deadline: Deadline) -> None:
    with (
        open_service(server.address, serial, "sync:", deadline) as connection,
        Path(__file__).open("rb", buffering=0) as source,
    ):
        session = SyncSession(connection)
        session.send(source, "/data/local/tmp/struck", mode=0o644, mtime=1)
        session.finish()
        assert session.stat("/data/local/tmp/struck") is not None
        session.receive_many(["/data/local/tmp/struck"], [contextlib.nullcontext(io.BytesIO())])


@FAILURES
@pytest.mark.parametrize("use", [_by_query, _by_shell, _by_sync])
def test_a_deadline_leaves_no_socket_wherever_it_strikes(
    adb_server: AdbServer, virtual_device: Device, use: Use, failure: type[BaseException]
) -> None:
    with recorded_links() as links:
        for ask in range(1000):
            try:
                use(adb_server, virtual_device.serial, EndsAt(ask, failure))
            except failure:
                assert [link.fileno() for link in links] == [-1] * len(links), f"asked {ask} times"
            else:
                break
    assert len(links) > 2
    assert [link.fileno() for link in links] == [-1] * len(links)
    virtual_device.shell("rm -f $TMPDIR/struck")
