"""Whose connection came in on this host's loopback.

A port on loopback is open to everybody on this host; what is tunnelled is the user's alone.
"""

import os
import socket
import time
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_TRIES = 5
_ROOT = 0


def is_ours(connection: socket.socket) -> bool:
    """Whether our user, or root, has the other end of an accepted IPv4 loopback connection.

    Where the system does not tell, as outside Linux, it is taken to be ours.
    """
    host, port = connection.getpeername()[:2]
    number = int.from_bytes(socket.inet_aton(host), "little")
    wanted = f"{number:08X}:{port:04X}"
    for _ in range(_TRIES):
        try:
            table = _TABLE.read_text("ascii", "replace")
        except OSError:
            return True
        # Columns: number, local address, remote address, state, ..., uid (the eighth).
        for row in map(str.split, table.splitlines()):
            if len(row) > 7 and row[1] == wanted:
                return row[7] in {str(os.geteuid()), str(_ROOT)}
        time.sleep(0.001)  # a table read while sockets come and go may lack lines
    return False
