"""A port of this host's loopback that leads to a port of another host, through its connection."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import paramiko

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.connection import FailReply, StreamClosed
from harness.devices.ssh.host import SshHost
from harness.errors import HarnessError, HostUnreachableError

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


_OPEN_TIMEOUT_S = 15.0
_RETRY_S = 0.1
_CHUNK = 256 * 1024
_LOOPBACK = "127.0.0.1"


class Tunnel:
    """Lives as a context manager, or until `close`; a connection through it ends with it.

    It survives the loss of the host's connection: the next one through it connects again.

    Attributes:
        failure: why the last connection through it did not reach the host; `None` if it did.
        refusal: why the host let the last connection go no further; empty if it did.
    """

    def __init__(self, host: SshHost, port: int) -> None:
        self._host = host
        self._port = port
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._address = (_LOOPBACK, int(self._listener.getsockname()[1]))
        self._open: set[socket.socket | paramiko.Channel] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.failure: HarnessError | None = None
        self.refusal = ""
        self._thread = threading.Thread(target=self._accept, name=f"tunnel {port}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where it begins, on this host."""
        return self._address

    def close(self) -> None:
        """End it, with all that goes through it."""
        with self._lock:
            self._closed = True
            ends = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._listener.close()
        for end in ends:
            _hang_up(end)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # too many open files, for example
                continue
            name = f"tunnel {self._port} connection"
            serve = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
            try:
                serve.start()
            except RuntimeError:  # no more threads
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            if self._closed:
                return  # or the host would be connected to anew
            channel = self._channel(connection)
            if channel is None:
                return
            with channel:
                self._keep(connection, channel)
                back = threading.Thread(
                    target=_pump, args=(channel, connection), name="tunnel back", daemon=True
                )
                back.start()
                _pump(connection, channel)
                back.join()
                with self._lock:
                    self._open -= {connection, channel}

    def _channel(self, connection: socket.socket) -> paramiko.Channel | None:
        failure: HarnessError | None = None
        refusal = ""
        channel = None
        try:
            if is_ours(connection):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = self._host.channel_to((_LOOPBACK, self._port), Deadline(_OPEN_TIMEOUT_S))
        except HarnessError as error:
            failure = error
        except FailReply as error:
            refusal = str(error)
        except (DeadlineExceeded, StreamClosed, OSError) as error:
            reason = str(error) or f"no answer within {_OPEN_TIMEOUT_S:g} s"
            failure = HostUnreachableError(self._host.config.asked, reason)
        self.failure, self.refusal = failure, refusal
        return channel

    def _keep(self, *ends: socket.socket | paramiko.Channel) -> None:
        """Remember what `close` has to end; what comes after it is ended at once."""
        with self._lock:
            self._open.update(ends)
            closed = self._closed
        if closed:
            for end in ends:
                _hang_up(end)


def _pump(
    source: socket.socket | paramiko.Channel, target: socket.socket | paramiko.Channel
) -> None:
    """Carry everything one way, and the end of it."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
        return
    _hang_up(source)
    _hang_up(target)


def _hang_up(end: socket.socket | paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if isinstance(end, paramiko.Channel):
            end.close()  # a shutdown would wake nobody who reads
        else:
            end.shutdown(socket.SHUT_RDWR)
