"""The shell protocol against a peer that may do anything, over a real socket."""

import io
import socket
import struct
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import Deadline
from harness.devices.adb.connection import Connection, ServerAddress
from harness.devices.adb.transport import ShellSession
from harness.devices.base import StreamClosed

_PATIENCE_S = 120.0


def _packet(kind: int, data: bytes) -> bytes:
    return struct.pack("<BI", kind, len(data)) + data


@dataclass
class _Outputs:
    stdout: io.BytesIO = field(default_factory=io.BytesIO)
    stderr: io.BytesIO = field(default_factory=io.BytesIO)


def _run(stream: bytes, *, stdin: bytes = b"") -> tuple[int, _Outputs, bytes]:
    """A session whose peer sends `stream`, and what the peer got."""
    outputs = _Outputs()
    got = bytearray()

    def peer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_PATIENCE_S)
            if stdin:
                while not got.endswith(_packet(4, b"")):
                    got.extend(connection.recv(65536))
            connection.sendall(stream)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=peer, args=(listener,))
        thread.start()
        try:
            address = ServerAddress("127.0.0.1", listener.getsockname()[1])
            with Connection(address, Deadline(_PATIENCE_S)) as connection:
                session = ShellSession(connection, outputs.stdout, outputs.stderr)
                return session.run(stdin), outputs, bytes(got)
        finally:
            thread.join()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 5, 9]), st.binary(max_size=50)), max_size=8),
    st.integers(0, 255),
)
def test_streams_are_kept_apart(packets: list[tuple[int, bytes]], status: int) -> None:
    stream = b"".join(_packet(kind, data) for kind, data in packets) + _packet(3, bytes([status]))
    exit_status, outputs, _ = _run(stream)
    out = b"".join(data for kind, data in packets if kind == 1)
    err = b"".join(data for kind, data in packets if kind == 2)
    assert exit_status == status
    assert outputs.stdout.getvalue() == out
    assert outputs.stderr.getvalue() == err


def test_input_arrives_in_packets_and_is_closed() -> None:
    stdin = bytes(range(256)) * 200
    status, _, got = _run(_packet(3, b"\0"), stdin=stdin)
    assert status == 0
    body = bytearray()
    while got:
        kind, length = struct.unpack("<BI", got[:5])
        body += got[5 : 5 + length] if kind == 0 else b""
        got = got[5 + length :]
    assert bytes(body) == stdin


@pytest.mark.parametrize("stream", [b"", b"\1", _packet(1, b"x"), b"\1\xff\xff\xff\xffabc"])
def test_an_end_without_exit_status_is_no_success(stream: bytes) -> None:
    with pytest.raises(StreamClosed):
        _run(stream)
