"""The loopback port of a device: the same one as long as possible."""

import asyncio
import logging
import socket

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_REBIND_PATIENCE_S = 30.0


def bind_preferred(port: int | None) -> socket.socket:
    """The port of last time if nobody else has taken it, else any. Raises: OSError."""
    if port:
        try:
            return _bind(port)
        except OSError as error:
            log.warning("port %d cannot be had again: %s", port, error)
    return _bind(0)


async def bind_again(port: int) -> socket.socket:
    """The port that was given up for a moment. Raises: OSError."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _REBIND_PATIENCE_S
    while True:
        try:
            return _bind(port)
        except OSError:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.1)


def port_of(server: asyncio.Server) -> int:
    """Where it listens."""
    return int(server.sockets[0].getsockname()[1])


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    except OSError:
        listener.close()
        raise
    return listener
