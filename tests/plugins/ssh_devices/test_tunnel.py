"""A tunnel through a real OpenSSH server."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from harness.errors import HostUnreachableError
from plugins.ssh_devices.host import SshHost
from plugins.ssh_devices.tunnel import Tunnel
from tests.plugins.ssh_devices.ssh_server import SshServer


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets, until the end of it; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(link: socket.socket) -> None:
            with link:
                while data := link.recv(65536):
                    link.sendall(data)

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(link,), daemon=True).start()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def exchange(address: tuple[str, int], data: bytes) -> bytes:
    """Send everything, end the sending, and read to the end."""
    with socket.create_connection(address, 120) as link:

        def send() -> None:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        answer = b"".join(iter(lambda: link.recv(65536), b""))
        thread.join()
        return answer


def test_both_ways_and_to_the_end(host: SshHost, echo: int) -> None:
    data = os.urandom(2_000_000)
    with Tunnel(host, echo) as tunnel:
        assert tunnel.address[0] == "127.0.0.1"
        assert exchange(tunnel.address, data) == data
        assert exchange(tunnel.address, b"") == b""
        assert tunnel.failure is None


def test_what_goes_through_ends_with_it(host: SshHost, echo: int) -> None:
    with Tunnel(host, echo) as tunnel:
        link = socket.create_connection(tunnel.address, 120)
        link.sendall(b"x")
        assert link.recv(1) == b"x"
    with link:
        assert link.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(tunnel.address, 120)


def test_a_port_where_nothing_listens(host: SshHost) -> None:
    with contextlib.ExitStack() as stack:
        nobody = stack.enter_context(socket.socket())  # which keeps it, so that nobody else does
        nobody.bind(("127.0.0.1", 0))
        tunnel = stack.enter_context(Tunnel(host, nobody.getsockname()[1]))
        assert exchange(tunnel.address, b"") == b""
        assert "failed" in tunnel.refusal.lower() or "refused" in tunnel.refusal.lower()
        assert tunnel.failure is None


def test_it_survives_the_loss_of_the_connection(
    ssh_server: SshServer, host: SshHost, echo: int
) -> None:
    with Tunnel(host, echo) as tunnel:
        assert exchange(tunnel.address, b"a") == b"a"
        with socket.create_connection(tunnel.address, 120) as link:
            link.sendall(b"x")
            assert link.recv(1) == b"x"
            ssh_server.drop_connections()
            assert link.recv(1) == b""
        assert exchange(tunnel.address, b"b") == b"b"
        ssh_server.stop()
        host.close()
        with socket.create_connection(tunnel.address, 120) as link:
            assert link.recv(1) == b""
        assert isinstance(tunnel.failure, HostUnreachableError)


@pytest.mark.needs("root")
def test_other_users_of_this_machine_do_not_get_through(host: SshHost, echo: int) -> None:
    script = (
        "import os, socket, sys; os.setuid(65534);"
        "link = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 120);"
        "link.sendall(b'x'); link.shutdown(socket.SHUT_WR); print(link.recv(1))"
    )
    with Tunnel(host, echo) as tunnel:
        port = str(tunnel.address[1])
        command = [sys.executable, "-I", "-c", script, port]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "b'x'" not in said.stdout
        assert exchange(tunnel.address, b"x") == b"x"
