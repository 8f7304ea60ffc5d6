"""Connections through this host's ports, where what they go through ends."""

import socket
import threading

from harness.devices.forward import Forward


class LostEnd:
    """An end of a connection that is gone: `paramiko` says so with `EOFError`."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def recv(self, _size: int, /) -> bytes:
        return b""

    def sendall(self, _data: bytes, /) -> None:
        raise EOFError

    def end_sending(self) -> None:
        pass

    hang_up = end_sending

    def close(self) -> None:
        self.is_closed.set()
        raise EOFError


def test_a_connection_that_is_lost_ends_without_an_error() -> None:
    end = LostEnd()
    with Forward(lambda _deadline: end, "lost") as forward:
        with socket.create_connection(forward.address) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b""
        assert end.is_closed.wait(200)
        for thread in threading.enumerate():
            if thread.name == "lost connection":
                thread.join(200)
