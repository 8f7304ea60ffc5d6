"""Port of this host's loopback that leads to a port of a device, for as long as it is open."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from buildlib.closeable import Closeable
from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import FailReply, ServerUnreachable, StreamClosed
from harness.devices.socket_owner import is_ours
from harness.errors import HarnessError

LOOPBACK = "127.0.0.1"
OPEN_TIMEOUT_S = 15.0
_RETRY_S = 0.1
_CHUNK = 256 * 1024


class End(Protocol):
    """One end of a connection. Any method may raise `OSError` or `EOFError`."""

    def recv(self, size: int, /) -> bytes:
        """Wait for bytes; none are the end."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send bytes."""
        ...

    def end_sending(self) -> None:
        """Tell the other side that no more comes."""
        ...

    def hang_up(self) -> None:
        """End both ways; wakes a thread that waits here."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class SocketEnd:
    """A socket as an `End`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.recv = connection.recv
        self.sendall = connection.sendall
        self.close = connection.close

    def end_sending(self) -> None:
        """See `End`."""
        self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """See `End`."""
        self._socket.shutdown(socket.SHUT_RDWR)


class Forward(Closeable):
    """Lives as a context manager, or until `close`; a connection through it ends with it.

    Only this user, and root, get through.

    Args:
        connect: makes a connection to the device, for each that is made to the port.
        name: for its threads.
    """

    def __init__(self, connect: Callable[[Deadline], End], name: str) -> None:
        self._connect = connect
        self._name = name
        self._listener = socket.create_server((LOOPBACK, 0))
        self._address = (LOOPBACK, int(self._listener.getsockname()[1]))
        self._open: set[End] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Its beginning on this host."""
        return self._address

    def close(self) -> None:
        """End it, with all that goes through it; does nothing if that was done."""
        with self._lock:
            self._closed = True
            ends = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._listener.close()
        for end in ends:
            _hang_up(end)

    def open_end(self) -> End | None:
        """Connect to the device; `None` if that fails."""
        try:
            return self._connect(Deadline(OPEN_TIMEOUT_S))
        except (
            HarnessError, FailReply, StreamClosed, ServerUnreachable, DeadlineExceeded, OSError,
        ):  # fmt: skip
            return None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # too many open files, for example
                continue
            serve = threading.Thread(
                target=self._serve, args=(connection,), name=f"{self._name} connection", daemon=True
            )
            try:
                serve.start()
            except RuntimeError:  # no more threads
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            # Where it is closed already, a host would be connected to anew.
            if self._closed or not _admitted(connection):
                return
            far = self.open_end()
            if far is None:
                return
            near = SocketEnd(connection)
            try:
                self._keep(near, far)
                back = threading.Thread(
                    target=_pump, args=(far, near), name=f"{self._name} back", daemon=True
                )
                back.start()
                _pump(near, far)
                back.join()
                with self._lock:
                    self._open -= {near, far}
            finally:
                with contextlib.suppress(OSError, EOFError):  # what it goes through ends, too
                    far.close()

    def _keep(self, *ends: End) -> None:
        """Remember ends for `close`; after it, they are ended at once."""
        with self._lock:
            self._open.update(ends)
            is_closed = self._closed
        if is_closed:
            for end in ends:
                _hang_up(end)


def _admitted(connection: socket.socket) -> bool:
    try:
        return is_ours(connection)
    except OSError:  # it is gone again
        return False


def _pump(source: End, target: End) -> None:
    """Carry everything one way, and the end of it."""
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.end_sending()
        return
    _hang_up(source)
    _hang_up(target)


def _hang_up(end: End) -> None:
    with contextlib.suppress(OSError, EOFError):
        end.hang_up()
