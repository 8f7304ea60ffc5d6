"""The loopback port of a device: the same one as long as possible."""

import asyncio
import logging
import socket

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_REBIND_PATIENCE_S = 30.0
_REBIND_EVERY_S = 0.002


def bind_preferred(port: int | None) -> socket.socket:
    """The port of last time if nobody else has taken it, else any. Raises: OSError."""
    if port:
        try:
            return _bind(port)
        except OSError as error:
            log.warning("port %d cannot be had again: %s", port, error)
    return _bind(0)


async def hold(port: int) -> socket.socket:
    """Keep the port of a listener just closed; connections to it are refused. Raises: OSError.

    Otherwise the kernel hands it out while the device is off, and nobody finds the device again.
    A process that was started just now may keep the listener open until its exec(2) is through.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _REBIND_PATIENCE_S
    while True:
        try:
            held = _bind(port)
        except OSError:
            if loop.time() > deadline:
                raise
        else:
            _share(held, on=False)  # or whoever sets it too gets the port as long as none listens
            return held
        await asyncio.sleep(_REBIND_EVERY_S)


def usable(listener: socket.socket) -> socket.socket:
    """A port as it must be to listen on it, held or new."""
    _share(listener, on=True)
    return listener


def port_of(server: asyncio.Server) -> int:
    """Where it listens."""
    return int(server.sockets[0].getsockname()[1])


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _share(listener, on=True)
        listener.bind((LOOPBACK, port))
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    except OSError:
        listener.close()
        raise
    return listener


def _share(one: socket.socket, *, on: bool) -> None:
    """Whether connections that have ended leave the port usable."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, on)
