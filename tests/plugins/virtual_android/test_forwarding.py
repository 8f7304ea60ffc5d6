"""`adb forward` and `adb reverse`: ports of the device here, and ports of this host there."""

import contextlib
import shlex
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb
from tests.waiting import PATIENCE_S


@contextlib.contextmanager
def _echo_server() -> Iterator[int]:
    """A server of this host that sends back what it gets, in capitals."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        while data := peer.recv(65536):
                            peer.sendall(data.upper())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


_CLIENT = """\
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=200)
peer.sendall(sys.argv[2].encode())
print(peer.recv(100).decode())
"""


@pytest.fixture
def ask(on_device: Adb) -> Callable[[int, str], str]:
    """Sends a text to a port of the device; gives the answer."""

    def ask(port: int, text: str) -> str:
        done = on_device("shell", shlex.join(["python3", "-c", _CLIENT, str(port), text]))
        said = done.stderr.decode().strip().splitlines() or [done.stdout.decode().strip()]
        return said[-1]

    return ask


@pytest.fixture
def reversed_port(on_device: Adb) -> Iterator[Callable[[int], int]]:
    """Reverses a port of the device to one of this host; ends all at the end."""

    def reverse(port: int) -> int:
        done = on_device("reverse", "tcp:0", f"tcp:{port}")
        assert done.returncode == 0, done
        return int(done.stdout)

    yield reverse
    on_device("reverse", "--remove-all")


def test_a_port_of_the_device_leads_to_this_host(
    on_device: Adb, reversed_port: Callable[[int], int], ask: Callable[[int, str], str]
) -> None:
    with _echo_server() as port:
        there = reversed_port(port)
        for word in ("one", "two"):
            assert ask(there, word) == word.upper()
        assert on_device("reverse", "--list").stdout.split()[1:] == [
            f"tcp:{there}".encode(), f"tcp:{port}".encode(),
        ]  # fmt: skip
        assert on_device("reverse", "--remove", f"tcp:{there}").returncode == 0
        assert "refused" in ask(there, "late")
        assert on_device("reverse", "--list").stdout.strip() == b""
        gone = on_device("reverse", "--remove", f"tcp:{there}")
        assert (gone.returncode, b"not found" in gone.stderr) == (1, True)


def test_what_does_not_listen_on_this_host_ends_its_client(
    reversed_port: Callable[[int], int],
    new_port: Callable[[], int],
    ask: Callable[[int, str], str],
) -> None:
    assert ask(reversed_port(new_port()), "anybody?") == ""


def test_a_port_of_the_same_number(
    device: VirtualDevice, on_device: Adb, ask: Callable[[int, str], str]
) -> None:
    """An unconfined device shares the loopback, so its clients reach the port already."""
    with _echo_server() as port, _echo_server() as other:
        try:
            assert on_device("reverse", f"tcp:{port}", f"tcp:{port}").returncode == 0
            assert f"tcp:{port}".encode() in on_device("reverse", "--list").stdout
            assert ask(port, "same") == "SAME"
            again = on_device("reverse", "--no-rebind", f"tcp:{port}", f"tcp:{port}")
            assert again.returncode == 1
            moved = on_device("reverse", f"tcp:{port}", f"tcp:{other}")
            if device.namespace == "none":
                assert (moved.returncode, b"whose ports" in moved.stderr) == (1, True)
            assert ask(port, "moved") == "MOVED"
        finally:
            on_device("reverse", "--remove-all")


def test_listeners_end_with_the_connection(
    device: VirtualDevice,
    adb: Adb,
    connect: Callable[[str], None],
    reversed_port: Callable[[int], int],
    ask: Callable[[int, str], str],
) -> None:
    with _echo_server() as port:
        there = reversed_port(port)
        adb("disconnect", device.serial)
        connect(device.serial)
        assert "refused" in ask(there, "x")
        assert ask(reversed_port(port), "again") == "AGAIN"


def test_invalid_addresses_to_listen_on_are_refused(on_device: Adb) -> None:
    for spec in ("tcp:70000", "tcp:x", "udp:5", "jdwp:1", "localfilesystem:/no/such/folder/s"):
        refused = on_device("reverse", spec, "tcp:5000")
        assert (refused.returncode, refused.stderr.count(b"\n")) == (1, 1), spec
    assert on_device("shell", "echo alive").stdout == b"alive\n"
