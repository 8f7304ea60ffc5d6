"""Who gets in, and what becomes of peers that do not keep to the protocol."""

import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import adbutils
import pytest

from harness.virtual_device.manager import VirtualDevice
from harness.virtual_device.protocol import Command, pack_header

Adb = Callable[..., subprocess.CompletedProcess[bytes]]

_VERSION = 0x01000001


def _message(command: Command, arg0: int, arg1: int, payload: bytes = b"") -> bytes:
    return pack_header(command, arg0, arg1, payload, with_checksum=True) + payload


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


def test_the_owner_gets_in(on_device: Adb) -> None:
    done = on_device("get-state")
    assert done.stdout == b"device\n"
    features = on_device("features").stdout.split()
    assert {b"shell_v2", b"stat_v2", b"ls_v2", b"sendrecv_v2"} <= set(features)


def test_a_stranger_stays_outside(
    device: VirtualDevice, new_adb_server: Callable[[], dict[str, str]]
) -> None:
    environment = new_adb_server()

    def stranger(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [adbutils.adb_path(), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, timeout=200, check=False
        )

    stranger("connect", device.serial)
    deadline = time.monotonic() + 200
    while b"unauthorized" not in stranger("devices").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    refused = stranger("-s", device.serial, "shell", "id")
    assert refused.returncode != 0
    assert b"unauthorized" in refused.stderr


def test_nothing_is_served_before_authentication(device: VirtualDevice) -> None:
    for early in (
        _message(Command.OPEN, 1, 0, b"shell:id\0"),
        _message(Command.CNXN, _VERSION, 1 << 20, b"host::")
        + _message(Command.OPEN, 1, 0, b"shell:id\0"),
        _message(Command.AUTH, 2, 0, bytes(256)),
    ):
        with _peer(device) as peer:
            peer.sendall(early)
            assert _is_closed(peer)


def test_wrong_signatures_only_get_new_tokens(device: VirtualDevice) -> None:
    with _peer(device) as peer:
        peer.sendall(_message(Command.CNXN, _VERSION, 1 << 20, b"host::"))
        tokens = set()
        for _ in range(3):
            command, kind, _, length, _, _ = struct.unpack("<6I", _read_exactly(peer, 24))
            assert (command, kind, length) == (Command.AUTH, 1, 20)
            tokens.add(_read_exactly(peer, 20))
            peer.sendall(_message(Command.AUTH, 2, 0, os.urandom(256)))
        assert len(tokens) == 3


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http"),
        pytest.param(struct.pack("<6I", Command.CNXN, 1, 2, 3, 4, 5), id="bad magic"),
        pytest.param(
            struct.pack(
                "<6I", Command.CNXN, _VERSION, 1 << 20, 1 << 31, 0, Command.CNXN ^ 0xFFFFFFFF
            ),
            id="two gigabytes",
        ),
        pytest.param(_message(Command.CNXN, 1, 1, b"host::"), id="no such version"),
        pytest.param(_message(Command.CNXN, _VERSION, 1 << 20, b"host::") * 2, id="greets twice"),
    ],
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


def test_unknown_services_are_refused_politely(on_device: Adb) -> None:
    assert b"production builds" in on_device("root").stdout
    assert on_device("shell", "echo alive").stdout == b"alive\n"
