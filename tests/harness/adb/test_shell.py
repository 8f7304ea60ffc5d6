"""The shell protocol against a peer that may do anything, over a real socket."""

import shlex
import socket
import struct
import subprocess
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.adb.address import ServerAddress
from harness.adb.connection import Connection, Deadline, DeadlineExceeded, StreamClosed
from harness.adb.shell import BoundedOutput, ShellSession, command_line


def _packet(kind: int, data: bytes) -> bytes:
    return struct.pack("<BI", kind, len(data)) + data


def _run(
    stream: bytes, *, stdin: bytes = b"", timeout_s: float = 5.0, linger_s: float = 0.0
) -> tuple[int, ShellSession, bytes]:
    """A session whose peer sends `stream`, and what the peer got."""
    got = bytearray()

    def peer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            if stdin:
                while not got.endswith(_packet(4, b"")):
                    got.extend(connection.recv(65536))
            connection.sendall(stream)
            time.sleep(linger_s)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=peer, args=(listener,))
        thread.start()
        try:
            address = ServerAddress("127.0.0.1", listener.getsockname()[1])
            with Connection(address, Deadline(timeout_s)) as connection:
                session = ShellSession(connection, max_output=1000)
                return session.run(stdin), session, bytes(got)
        finally:
            thread.join()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 5, 9]), st.binary(max_size=50)), max_size=8),
    st.integers(0, 255),
)
def test_streams_are_kept_apart(packets: list[tuple[int, bytes]], status: int) -> None:
    stream = b"".join(_packet(kind, data) for kind, data in packets) + _packet(3, bytes([status]))
    exit_status, session, _ = _run(stream)
    out = b"".join(data for kind, data in packets if kind == 1)
    err = b"".join(data for kind, data in packets if kind == 2)
    assert exit_status == status
    assert session.stdout.text() == out.decode("utf-8", "replace")
    assert session.stderr.text() == err.decode("utf-8", "replace")


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


def test_the_deadline_counts_from_the_start_and_not_from_each_packet() -> None:
    drip = threading.Event()

    def peer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not drip.wait(0.05):
                connection.sendall(_packet(1, b"."))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=peer, args=(listener,))
        thread.start()
        started = time.monotonic()
        try:
            address = ServerAddress("127.0.0.1", listener.getsockname()[1])
            with (
                Connection(address, Deadline(0.4)) as connection,
                pytest.raises(DeadlineExceeded),
            ):
                ShellSession(connection, max_output=1000).run()
            assert 0.3 < time.monotonic() - started < 2
        finally:
            drip.set()
            thread.join()


@given(st.lists(st.binary(max_size=80), max_size=30), st.integers(2, 60))
def test_output_is_bounded_and_what_is_missing_is_counted(pieces: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.write(piece)
    text = output.text()
    whole = b"".join(pieces)
    if len(whole) <= limit - limit % 2:
        assert text == whole.decode("utf-8", "replace")
    else:
        assert output.dropped == len(whole) - 2 * (limit // 2)
        assert f"{output.dropped} bytes left out" in text


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=5)
)
def test_words_survive_mksh(words: list[str]) -> None:
    line = command_line(["printf", "%s\\0", *words], {"V": "a'b\n$(false)"})
    output = subprocess.run(["mksh", "-c", line], capture_output=True, check=True).stdout
    assert output == b"".join(word.encode() + b"\0" for word in words)


def test_what_no_command_can_hold() -> None:
    with pytest.raises(ValueError, match="NUL"):
        command_line(["echo", "a\0b"])
    with pytest.raises(ValueError, match="no name"):
        command_line("env", {"A; rm -rf /": "x"})
    assert command_line("exit $V", {"V": "3 4"}) == f"export V={shlex.quote('3 4')}; exit $V"
