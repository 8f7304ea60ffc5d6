"""Connection to an adb server, in which all waiting ends by one deadline.

adbutils, from which our `adb` program comes, speaks the same protocol; `docs/devices.md` says why
its client does not do.

Protocol: AOSP `packages/modules/adb/docs/dev/{overview,services}.md`.
"""

import contextlib
import errno
import ipaddress
import math
import os
import re
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from buildlib.closeable import Closeable
from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import FailReply, ServerUnreachable, Stalled, StreamClosed
from harness.errors import AdbServerError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 5037

_UNIX = "localfilesystem:"
_TCP = re.compile(r"tcp:(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):)?(?P<port>\d+)")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of an adb server: a port, or a unix socket.

    Attributes:
        path: of the unix socket; empty for a port.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    path: str = ""

    @property
    def local(self) -> bool:
        """True if it is on this host alone: only there may a server be started."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def spec(self) -> str:
        """The value of `ADB_SERVER_SOCKET` that names it."""
        return str(self) if self.path else f"tcp:{self}"

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connection to it, which the caller closes."""
        if not self.path:
            return socket.create_connection((self.host, self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address_from(environ: Mapping[str, str]) -> ServerAddress | None:
    """Return the address that `environ` names, if it names one."""
    if spec := environ.get("ADB_SERVER_SOCKET"):
        return _parse_socket(spec)
    host = environ.get("ANDROID_ADB_SERVER_ADDRESS") or environ.get("ANDROID_ADB_SERVER_HOST")
    port = environ.get("ANDROID_ADB_SERVER_PORT")
    if not host and not port:
        return None
    return ServerAddress(
        host or DEFAULT_HOST,
        _parse_port("ANDROID_ADB_SERVER_PORT", port) if port else DEFAULT_PORT,
    )


def _parse_socket(spec: str) -> ServerAddress:
    name = "ADB_SERVER_SOCKET"
    if spec.startswith(f"{_UNIX}/") and "\0" not in spec:
        return ServerAddress(path=spec.removeprefix(_UNIX))
    match = _TCP.fullmatch(spec)
    if match is None:
        forms = "tcp:HOST:PORT, tcp:PORT and localfilesystem:/PATH"
        raise AdbServerError(f"{name}={spec!r}", f"only {forms} are supported")
    host = (match["host"] or DEFAULT_HOST).strip("[]")
    return ServerAddress(host, _parse_port(name, match["port"], spec))


def _parse_port(variable: str, text: str, value: str | None = None) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536 and len(text) < 7):
        raise AdbServerError(
            f"{variable}={value or text!r}", "the port is a number from 1 to 65535"
        )
    return int(text)


_LENGTH = re.compile(rb"[0-9A-Fa-f]{4}")
_CONNECT_TIMEOUT_S = 5.0
_MAX_SERVICE = 0xFFFF
_MAX_REPLY = 1 << 20
_MORE_FOLLOWS: int = getattr(socket, "MSG_MORE", 0)  # Linux: no packet for the head alone
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # some file systems


class Connection(Closeable):
    """A socket to an adb server; a context manager that closes it.

    Attributes:
        stall_s: longest silence that its user accepts, for a service whose bytes show progress.

    Raises:
        ServerUnreachable: nothing listens there.
        StreamClosed: by any method, when the other side closes the connection.
        DeadlineExceeded: by any method, when the deadline passes.
        Stalled: by any method, after a silence of `stall_s`.
    """

    def __init__(self, address: ServerAddress, deadline: Deadline) -> None:
        self._deadline = deadline
        self.stall_s = math.inf
        try:
            self._socket = address.connect(min(_CONNECT_TIMEOUT_S, deadline.remaining()))
        except OSError as error:
            raise ServerUnreachable(str(error)) from error
        # A unix socket has neither; on some systems, nor has one that was closed already.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """Hand the socket over, once the service of the connection was granted."""
        return self._socket

    def request(self, service: str) -> None:
        """Ask for a service and wait until it is granted.

        Raises:
            FailReply: it was not, with the reason.
        """
        data = service.encode("utf-8", "surrogateescape")
        if len(data) > _MAX_SERVICE:
            raise FailReply(f"the request has {len(data)} bytes, {_MAX_SERVICE} are possible")
        self.send(b"%04x%s" % (len(data), data))
        self.expect_okay()

    def expect_okay(self) -> None:
        """Wait for the server's consent; see `request`."""
        status = self.receive(4)
        if status == b"FAIL":
            raise FailReply(self.receive_block())
        if status != b"OKAY":
            raise FailReply(f"no adb server: it answered {status!r}")

    def receive_block(self) -> str:
        """Read a text behind its length in four hexadecimal digits."""
        digits = self.receive(4)
        if not _LENGTH.fullmatch(digits):
            raise FailReply(f"no adb server: {digits!r} is no length")
        return self.receive(int(digits, 16)).decode("utf-8", "replace")

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`."""
        self._socket.settimeout(self._patience_s())
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise StreamClosed(str(error)) from error

    def send_file(self, head: bytes, file: int, offset: int, count: int) -> None:
        """Send `head` and then `count` bytes of an open file, which the kernel passes on itself.

        Raises:
            FailReply: the file ended before.
        """
        end = offset + count
        try:
            self._socket.settimeout(self._patience_s())
            self._socket.sendall(head, _MORE_FOLLOWS)
            while offset < end:
                try:
                    count_sent = os.sendfile(self._socket.fileno(), file, offset, end - offset)
                except BlockingIOError:
                    self.wait(readable=False, writable=True)
                    continue
                except OSError as error:
                    if error.errno not in _NO_SENDFILE:
                        raise
                    data = os.pread(file, end - offset, offset)
                    self.send(data)
                    count_sent = len(data)
                if not count_sent:
                    raise FailReply("the file became shorter while it was sent")
                offset += count_sent
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise StreamClosed(str(error)) from error

    def send_some(self, data: memoryview) -> int:
        """Send as much as the socket takes without waiting; gives the number of bytes."""
        self._socket.settimeout(0)
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamClosed(str(error)) from error

    def receive_some(self, limit: int) -> bytes:
        """Receive at least one and at most `limit` bytes."""
        self._socket.settimeout(self._patience_s())
        try:
            data = self._socket.recv(limit)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise StreamClosed(str(error)) from error
        if not data:
            raise StreamClosed("the connection was closed")
        return data

    def receive(self, size: int) -> bytes:
        """Receive exactly `size` bytes, which are refused above 1 MiB."""
        if size > _MAX_REPLY:
            raise FailReply(f"an answer of {size} bytes is not plausible")
        data = bytearray()
        while len(data) < size:
            data += self.receive_some(size - len(data))
        return bytes(data)

    def wait(self, *, readable: bool, writable: bool) -> tuple[bool, bool]:
        """Wait until the socket is ready for one of these; gives (readable, writable)."""
        flags = (select.POLLIN if readable else 0) | (select.POLLOUT if writable else 0)
        events = self._poll(flags, self._patience_s())
        if not events:
            raise self._late()
        return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)

    def has_input(self) -> bool:
        """Return whether a read would not wait."""
        return bool(self._poll(select.POLLIN, 0))

    def _patience_s(self) -> float:
        return self._deadline.at_most(self.stall_s)

    def _late(self) -> Exception:
        """Return why a wait is over."""
        try:
            self._deadline.remaining()
        except DeadlineExceeded as error:
            return error
        return Stalled(self.stall_s) if self.stall_s < math.inf else DeadlineExceeded()

    def _poll(self, flags: int, timeout_s: float) -> int:
        poll = select.poll()
        poll.register(self._socket, flags)
        ready = poll.poll(timeout_s * 1000)
        return ready[0][1] if ready else 0


def query(address: ServerAddress, service: str, deadline: Deadline) -> str:
    """Return the text that the server answers to a `host:` service."""
    with Connection(address, deadline) as connection:
        connection.request(service)
        return connection.receive_block()


def open_service(
    address: ServerAddress, serial: str, service: str, deadline: Deadline
) -> Connection:
    """Return a connection to `service` on the device `serial`, which the caller closes."""
    connection = Connection(address, deadline)
    try:
        connection.request(f"host:transport:{serial}")
        connection.request(service)
    except BaseException:
        connection.__exit__(None, None, None)
        raise
    return connection
