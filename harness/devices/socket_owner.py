"""Owners of sockets: which user of this host is at the other end of a connection.

Linux tells it, in `/proc/net/tcp` for TCP (proc_pid_net(5)) and by SO_PEERCRED for unix sockets.
Another system, or a container without `/proc`, does not.
"""

import ipaddress
import os
import pwd
import socket
import struct
import time
from pathlib import Path
from typing import Literal, NamedTuple

_PROC = Path("/proc")
_LISTENING = "0A"
_NO_PROCESS = "0"
_ROOT = 0
_TRIES = 5
_RETRY_S = 0.001
_CREDENTIALS = struct.Struct("iII")


class TcpSocket(NamedTuple):
    """A line of the kernel's tables; addresses in their form, e.g. `0100007F:13AD`."""

    local: str
    remote: str
    listens: bool
    uid: int
    inode: str


def tcp_sockets(pid: int | Literal["self"]) -> list[TcpSocket]:
    """Return the TCP sockets in the network that a process sees.

    A table that is read while sockets come and go may lack lines.

    Raises:
        OSError: the system has no such tables.
    """
    text = (_PROC / str(pid) / "net/tcp").read_text("ascii", "replace")
    six = _PROC / str(pid) / "net/tcp6"
    if six.exists():  # a kernel may have no IPv6
        text += six.read_text("ascii", "replace")
    # Columns: number, local address, remote address, state, ..., uid (the eighth), ..., inode.
    rows = (line.split() for line in text.splitlines())
    return [
        TcpSocket(row[1], row[2], row[3] == _LISTENING, int(row[7]), row[9])
        for row in rows
        if len(row) > 9 and row[7].isdecimal()
    ]


def is_ours(connection: socket.socket) -> bool:
    """Return whether our user, or root, has the other end of an accepted IPv4 loopback connection.

    Where the system does not tell, it is taken to be ours.
    """
    peer = _kernel_names(*connection.getpeername()[:2])
    for _ in range(_TRIES):
        try:
            rows = tcp_sockets("self")
        except OSError:
            return True
        for row in rows:
            if row.local in peer:
                return row.uid in (os.geteuid(), _ROOT)
        time.sleep(_RETRY_S)
    return False


def server_owners(connection: socket.socket) -> frozenset[int]:
    """Return the users at the other end of a connection that we made; empty where nobody tells.

    These are the owner of the end itself and, since a TCP server has no end before it accepts the
    connection, of the socket that listens at its address.
    """
    if connection.family == socket.AF_UNIX:
        return _unix_owner(connection)
    (host, port), own = connection.getpeername()[:2], connection.getsockname()[:2]
    if not (ipaddress.ip_address(host).is_loopback or host == own[0]):
        return frozenset()
    peer, here = _kernel_names(host, port), _kernel_names(*own)
    any_address = {f"{'0' * digits}:{port:04X}" for digits in (8, 32)}
    for _ in range(_TRIES):
        try:
            rows = tcp_sockets("self")
        except OSError:
            return frozenset()
        listening = [row for row in rows if row.listens]
        owners = [row.uid for row in listening if row.local in peer]
        owners = owners or [row.uid for row in listening if row.local in any_address]
        owners += [
            row.uid
            for row in rows
            if row.local in peer and row.remote in here and row.inode != _NO_PROCESS
        ]
        if owners:
            return frozenset(owners)
        time.sleep(_RETRY_S)
    return frozenset()


def user_name(uid: int) -> str:
    """Return the name of a user's account, `uid 4711` if it has none; ignores `$USER`."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _unix_owner(connection: socket.socket) -> frozenset[int]:
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return frozenset()
    size = _CREDENTIALS.size
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, size))
    return frozenset({uid})


def _kernel_names(host: str, port: int) -> frozenset[str]:
    """Return how the tables write an address: words of 32 bits, in the machine's byte order."""
    # A socket for both versions of IP has an IPv4 address as `::ffff:a.b.c.d`.
    address = ipaddress.ip_address(host)
    forms = [address.packed]
    if address.version == 4:
        forms.append(ipaddress.IPv6Address(f"::ffff:{host}").packed)
    return frozenset(f"{_hex_words(form)}:{port:04X}" for form in forms)


def _hex_words(packed: bytes) -> str:
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)
