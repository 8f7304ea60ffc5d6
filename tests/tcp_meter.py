"""A TCP proxy on this host that counts what passes, and may be as slow as a cable."""

import contextlib
import fcntl
import os
import socket
import threading
import time
from types import TracebackType
from typing import Self

_CHUNK = 256 * 1024
_PIPE_BYTES = 1 << 20


class TcpMeter:
    """Passes connections to its port on `host` on to `target`; a context manager.

    Bytes go from socket to socket inside the kernel, so that the proxy costs next to nothing.

    Attributes:
        port: where it listens.
        sent_bytes: to the target.
        received_bytes: from the target.
    """

    def __init__(
        self, target: tuple[str, int], bytes_per_s: float | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent_bytes = 0
        self.received_bytes = 0
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._connections: list[tuple[threading.Thread, socket.socket]] = []

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for thread, near in self._connections:
            _hang_up(near)
            thread.join()

    @property
    def total_bytes(self) -> int:
        """In both directions."""
        return self.sent_bytes + self.received_bytes

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._connect, args=(near,), daemon=True)
                self._connections.append((thread, near))
                thread.start()

    def _connect(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._target) as far:
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(
                target=self._pump, args=(far, near), kwargs={"out": False}, daemon=True
            )
            back.start()
            self._pump(near, far, out=True)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, *, out: bool) -> None:
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            free_at = time.monotonic()
            while count := os.splice(source.fileno(), writer, _CHUNK):
                if out:
                    self.sent_bytes += count
                    free_at = self._wait(free_at, count)
                else:
                    self.received_bytes += count
                while count:
                    count -= os.splice(reader, sink.fileno(), count)
        os.close(reader)
        os.close(writer)
        _hang_up(source)
        _hang_up(sink)

    def _wait(self, free_at: float, count: int) -> float:
        """As long as a cable is busy with `count` bytes; gives when it is free again."""
        if self._bytes_per_s is None:
            return 0.0
        now = time.monotonic()
        free_at = max(free_at, now - 0.01) + count / self._bytes_per_s
        if free_at > now + 0.001:
            time.sleep(free_at - now)
        return free_at


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
