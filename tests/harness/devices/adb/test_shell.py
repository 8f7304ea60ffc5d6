"""The shell protocol in pieces, and against a peer that breaks off."""

import io
import socket
import struct
from typing import cast

import pytest

from harness.clock import Deadline
from harness.devices.adb.connection import Connection, ServerAddress
from harness.devices.adb.transport import ShellSession
from harness.devices.base import StreamClosed


@pytest.mark.parametrize("size", [1, 3, 7])
def test_packets_may_be_cut_anywhere(size: int) -> None:
    outputs = io.BytesIO(), io.BytesIO()
    session = ShellSession(cast("Connection", None), *outputs)
    packets = (1, b"out"), (2, b"err"), (9, b"of a later protocol"), (3, b"\7")
    stream = b"".join(struct.pack("<BI", kind, len(data)) + data for kind, data in packets)
    *before, status = [session._feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert set(before) == {None}
    assert status == 7
    assert [output.getvalue() for output in outputs] == [b"out", b"err"]


@pytest.mark.parametrize(
    "stream", [b"", b"\1", struct.pack("<BI", 1, 1) + b"x", b"\1\xff\xff\xff\xffabc"]
)
def test_an_end_without_exit_status_is_no_success(stream: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ServerAddress("127.0.0.1", listener.getsockname()[1])
        with Connection(address, Deadline(120)) as connection:
            with listener.accept()[0] as peer:
                peer.sendall(stream)
            session = ShellSession(connection, io.BytesIO(), io.BytesIO())
            with pytest.raises(StreamClosed):
                session.run(b"")
