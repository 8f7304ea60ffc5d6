"""Owners of sockets, by the kernel's tables: real ones, and drawn ones of other hosts."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.devices import socket_owner
from harness.devices.socket_owner import server_owners

_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  t inode"
_LISTENS, _STANDS = "0A", "01"
_ME, _STRANGER = 1000, 1001


def _row(local: str, remote: str, state: str, uid: int, inode: int = 7) -> str:
    return (
        f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1"
    )


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        yield client


@pytest.fixture
def owners(
    connection: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., frozenset[int]]:
    """Gives the server's owners by tables of ours; `P` is its port, `C` the client's."""
    monkeypatch.setattr(socket_owner, "_PROC", tmp_path)
    (tmp_path / "self/net").mkdir(parents=True)
    ports = {"P": connection.getpeername()[1], "C": connection.getsockname()[1]}

    def ask(*four: str, six: tuple[str, ...] | None = ()) -> frozenset[int]:
        for name, rows in (("tcp", four), ("tcp6", six)):
            text = "\n".join([_HEAD, *(rows or ())])
            for letter, port in ports.items():
                text = text.replace(f":{letter} ", f":{port:04X} ")
            if rows is not None:
                (tmp_path / "self/net" / name).write_text(text)
        return server_owners(connection)

    return ask


def test_the_owner_of_a_real_server_is_told(connection: socket.socket, tmp_path: Path) -> None:
    assert server_owners(connection) == {os.geteuid()}
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        client.connect(str(tmp_path / "socket"))
        assert server_owners(client) == {os.geteuid()}


def test_the_owner_of_a_real_server_for_ipv6_is_told() -> None:
    for family, host in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")):
        with (
            socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
            socket.socket(family) as client,
        ):
            client.connect((host, server.getsockname()[1]))
            assert server_owners(client) == {os.geteuid()}


def test_the_socket_at_the_very_address_counts(owners: Callable[..., frozenset[int]]) -> None:
    mine = _row("0100007F:P", "00000000:0000", _LISTENS, _ME)
    elsewhere = _row("0200007F:P", "00000000:0000", _LISTENS, _STRANGER)
    everywhere = _row("00000000:P", "00000000:0000", _LISTENS, _STRANGER)
    assert owners(mine, elsewhere, everywhere) == {_ME}
    assert owners(elsewhere, everywhere) == {_STRANGER}
    assert owners(mine, six=None) == {_ME}


def test_a_server_for_both_versions_of_ip_is_looked_for(
    owners: Callable[..., frozenset[int]],
) -> None:
    zeros = "0" * 32
    everywhere = _row(f"{zeros}:P", f"{zeros}:0000", _LISTENS, _STRANGER)
    mapped = _row("0000000000000000FFFF00000100007F:P", f"{zeros}:0000", _LISTENS, _ME)
    assert owners(six=(everywhere,)) == {_STRANGER}
    assert owners(six=(everywhere, mapped)) == {_ME}


def test_a_server_that_stops_listening_once_it_has_a_client_is_known(
    owners: Callable[..., frozenset[int]],
) -> None:
    theirs = _row("0100007F:P", "0100007F:C", _STANDS, _STRANGER)
    waiting = _row("0100007F:P", "0100007F:C", _STANDS, 0, inode=0)  # not accepted: nobody's yet
    honest = _row("0100007F:P", "00000000:0000", _LISTENS, _ME)
    assert owners(theirs) == {_STRANGER}
    assert owners(theirs, honest) == {_ME, _STRANGER}
    assert owners(waiting, honest) == {_ME}


def test_nobody_is_named_where_nobody_tells(
    owners: Callable[..., frozenset[int]],
    connection: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert owners("nonsense", "a b c d e f g h i j") == frozenset()  # none of this network has it
    monkeypatch.setattr(socket_owner, "_PROC", tmp_path / "no-proc")
    assert server_owners(connection) == frozenset()
