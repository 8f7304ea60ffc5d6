"""Peers that say anything: an adb server, a device's sync service, an SSH server."""

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.client import AdbDeviceInfo
from harness.devices.adb.connection import Connection, ServerAddress, query
from harness.devices.adb.server import resolve_server
from harness.devices.adb.transport import SyncSession
from harness.devices.base import FailReply, Stalled
from harness.devices.spec import AndroidType, DeviceSpec
from harness.errors import AdbServerError, HostUnreachableError

if TYPE_CHECKING:
    from pathlib import Path

    from harness.devices.devices import Devices

Serve = Callable[..., ServerAddress]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that sends `answer`, then `more` again and again until it is left."""
    with contextlib.ExitStack() as ends:

        def start(answer: bytes, more: bytes = b"", pause_s: float = 0.0) -> ServerAddress:
            listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))

            def speak() -> None:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(answer)
                        while more:
                            connection.sendall(more)
                            time.sleep(pause_s)
                        connection.recv(1 << 16)

            threading.Thread(target=speak, daemon=True).start()
            return ServerAddress("127.0.0.1", listener.getsockname()[1])

        yield start


@pytest.mark.parametrize("length", [b"-001", b"0x1f", b"1_00", b" 10 ", b"\xd9\xa1\xd9\xa2"])
def test_a_length_is_four_hexadecimal_digits(serve: Serve, length: bytes) -> None:
    with pytest.raises(FailReply, match="is no length"):
        query(serve(b"OKAY" + length + b"x" * 32), "host:version", Deadline(60))


def test_an_answer_in_drops_ends_with_the_deadline(serve: Serve) -> None:
    with pytest.raises(DeadlineExceeded):
        query(serve(b"OKAYffff", b"x", 0.05), "host:devices", Deadline(0.5))


def test_a_silence_longer_than_the_user_accepts_ends_before_the_deadline(serve: Serve) -> None:
    with Connection(serve(b"OKAY"), Deadline(3600)) as connection:
        connection.expect_okay()
        connection.stall_s = 0.1
        with pytest.raises(Stalled) as caught:
            connection.receive_some(1)
    assert caught.value.seconds == 0.1


@pytest.mark.parametrize("version", [b"0004zzzz", b"0004-029", b"1388" + b"f" * 5000])
def test_a_server_without_a_version_is_no_adb_server(serve: Serve, version: bytes) -> None:
    with pytest.raises(AdbServerError, match="is no adb server: its version is"):
        resolve_server(serve(b"OKAY" + version))


@pytest.mark.parametrize(
    "answer", [b"FAIL\xff\xff\xff\xff", b"DATA\xff\xff\xff\xff", b"DONG\0\0\0\0", b"OKAY\0\0\0\0"]
)
def test_a_device_sends_no_impossible_piece(serve: Serve, answer: bytes) -> None:
    with (
        Connection(serve(answer, b"x" * 4096), Deadline(60)) as connection,
        pytest.raises(FailReply, match=r"plausible|the device sent"),
    ):
        SyncSession(connection).receive_many(["/x"], [contextlib.nullcontext(io.BytesIO())])


def test_a_file_without_end_ends_with_the_deadline(serve: Serve) -> None:
    pieces = b"DATA\1\0\0\0x" * 1000
    with (
        Connection(serve(b"", pieces, 0.01), Deadline(0.5)) as connection,
        pytest.raises(DeadlineExceeded),
    ):
        SyncSession(connection).receive_many(["/x"], [contextlib.nullcontext(io.BytesIO())])


@pytest.mark.needs("openssh-client", "plugins.ssh_devices")
@pytest.mark.timeout(120)  # what serves the banner never ends
@pytest.mark.parametrize("banner", [b"x" * (1 << 16), b"\n" * (1 << 16), b"SSH-2.0-x\r\n" * 6000])
def test_an_ssh_banner_without_end_is_refused_in_time(
    serve: Serve, tmp_path: "Path", banner: bytes
) -> None:
    from plugins.ssh_devices.config import resolve_host
    from plugins.ssh_devices.connection import connect

    address = serve(b"", banner)
    config = tmp_path / "config"
    known = tmp_path / "known_hosts"
    config.write_text(
        f"Host board\n HostName 127.0.0.1\n Port {address.port}\n UserKnownHostsFile {known}\n"
    )
    with pytest.raises((HostUnreachableError, DeadlineExceeded)):
        connect(resolve_host("board", config), Deadline(0.5), None)


@pytest.mark.needs("plugins.virtual_android")
def test_a_serial_that_nobody_can_ask_for_hides_no_other_device() -> None:
    serials = ("a b\x1b[31m", "R5CX", "127.0.0.1:7")
    listed = [AdbDeviceInfo(serial, "device") for serial in serials]
    named = {"127.0.0.1:7": DeviceSpec("virtual", "alpha")}
    server = SimpleNamespace(devices=lambda: listed)
    hosts = SimpleNamespace(adb=lambda _: server)
    farm = SimpleNamespace(
        adb_server=lambda: server, hosts=lambda: hosts, connect_named=lambda: named
    )
    devices = cast("Devices", farm)
    found = [str(spec) for spec in AndroidType().discover(devices, None)]
    assert found == ["android:R5CX", "virtual:alpha"]
    found = [str(spec) for spec in AndroidType().discover(devices, "lab")]
    assert found == ["android:R5CX@lab", "android:127.0.0.1:7@lab"]
