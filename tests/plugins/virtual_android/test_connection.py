"""Authentication, and peers that violate the protocol."""

import os
import socket
import struct
import subprocess
from pathlib import Path

import adbutils
import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import address_from
from harness.errors import DeviceUnauthorizedError
from plugins.virtual_android.device_type import connect
from plugins.virtual_android.manager import VirtualDevice
from plugins.virtual_android.protocol import AdbCommand
from tests.plugins.virtual_android.helpers import Adb, pack_message
from tests.private_adb import private_variables
from tests.waiting import wait_for

_VERSION = 0x01000001
_U32 = 0xFFFFFFFF


def _peer(device: VirtualDevice) -> socket.socket:
    host, _, port = device.serial.partition(":")
    return socket.create_connection((host, int(port)), timeout=200)


def _read_exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        assert part, "the device closed the connection"
        data += part
    return data


def _is_closed(peer: socket.socket) -> bool:
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def test_a_strangers_key_is_refused(
    device: VirtualDevice, free_adb_port: int, tmp_path: Path
) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        **private_variables(tmp_path, free_adb_port),
        "ADB_SERVER_SOCKET": f"tcp:localhost:{free_adb_port}",  # there it starts by itself
    }

    def stranger(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [adbutils.adb_path(), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, timeout=200, check=False
        )

    stranger("connect", device.serial)
    wait_for(lambda: b"unauthorized" in stranger("devices").stdout)
    refused = stranger("-s", device.serial, "shell", "id")
    assert refused.returncode != 0
    assert b"unauthorized" in refused.stderr
    address = address_from(environment)
    assert address is not None
    with pytest.raises(DeviceUnauthorizedError, match="ADB_VENDOR_KEYS") as advised:
        connect(AdbServer(address, 41), device)
    assert f"device start {device.name}" in str(advised.value)


def test_nothing_is_served_before_authentication(device: VirtualDevice) -> None:
    for early in (
        pack_message(AdbCommand.OPEN, 1, 0, b"shell:id\0"),
        pack_message(AdbCommand.CNXN, _VERSION, 1 << 20, b"host::")
        + pack_message(AdbCommand.OPEN, 1, 0, b"shell:id\0"),
        pack_message(AdbCommand.AUTH, 2, 0, bytes(256)),
    ):
        with _peer(device) as peer:
            peer.sendall(early)
            assert _is_closed(peer)


def test_wrong_signatures_only_get_new_tokens(device: VirtualDevice) -> None:
    with _peer(device) as peer:
        peer.sendall(pack_message(AdbCommand.CNXN, _VERSION, 1 << 20, b"host::"))
        tokens = set()
        for _ in range(3):
            command, kind, _, length, _, _ = struct.unpack("<6I", _read_exactly(peer, 24))
            assert (command, kind, length) == (AdbCommand.AUTH, 1, 20)
            tokens.add(_read_exactly(peer, 20))
            peer.sendall(pack_message(AdbCommand.AUTH, 2, 0, os.urandom(256)))
        assert len(tokens) == 3


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("<6I", AdbCommand.CNXN, 1, 2, 3, 4, 5),
        struct.pack("<6I", AdbCommand.CNXN, _VERSION, 1 << 20, 1 << 31, 0, ~AdbCommand.CNXN & _U32),
        pack_message(AdbCommand.CNXN, 1, 1, b"host::"),
        pack_message(AdbCommand.CNXN, _VERSION, 1 << 20, b"host::") * 2,
    ],
    ids=["http", "bad magic", "two gigabytes", "no such version", "greets twice"],
)
def test_hostile_peers_are_cut_off_and_the_device_serves_on(
    device: VirtualDevice, on_device: Adb, hostile: bytes
) -> None:
    with _peer(device) as peer:
        peer.sendall(hostile)
        assert _is_closed(peer)
    assert on_device("shell", "echo alive").stdout == b"alive\n"


def test_many_silent_strangers_do_not_lock_the_owner_out(
    device: VirtualDevice, on_device: Adb, adb: Adb
) -> None:
    peers = [_peer(device) for _ in range(60)]
    try:
        adb("disconnect", device.serial)
        assert b"connected" in adb("connect", device.serial).stdout
        assert on_device("shell", "echo in").stdout == b"in\n"
    finally:
        for peer in peers:
            peer.close()


def test_only_loopback_listens(device: VirtualDevice) -> None:
    port = int(device.serial.partition(":")[2])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                listening.append(local.rpartition(":")[0])
    assert listening == ["0100007F"]
