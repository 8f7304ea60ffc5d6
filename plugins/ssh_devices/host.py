"""A host over SSH: one connection, made when needed, shared by threads, made anew when lost."""

import contextlib
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import paramiko

from buildlib.closeable import Closeable
from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import FailReply, StreamClosed
from harness.devices.commands import Sink
from harness.errors import HostUnreachableError
from plugins.ssh_devices.config import SshHostConfig, resolve_host
from plugins.ssh_devices.connection import OpenChannel, connect, hang_up

_READ = 256 * 1024
_KILLED = 128 + 9


def run(
    host: "SshHost",
    line: str,
    stdin: bytes | None,
    stdout: Sink,
    stderr: Sink,
    deadline: Deadline,
) -> int:
    """Have the user's shell there run `line`; gives its exit status, 137 when it was killed.

    Raises:
        StreamClosed: the connection ended before the command.
        FailReply, HostUnreachableError and others: see `SshHost.session`.
    """
    channel = host.session(deadline)
    with closing_by(channel, deadline):
        channel.exec_command(line.encode("utf-8", "surrogateescape"))
        _feed(channel, stdin)
        _read(channel, stdout, stderr, deadline)
        channel.status_event.wait(deadline.remaining())
        deadline.remaining()
        if channel.exit_status >= 0:
            return channel.exit_status
        if not stands(channel):
            raise StreamClosed("the connection was lost")
        return _KILLED


def _feed(channel: paramiko.Channel, stdin: bytes | None) -> None:
    def feed() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            channel.sendall(stdin or b"")
            channel.shutdown_write()

    if stdin:
        threading.Thread(target=feed, name="ssh stdin", daemon=True).start()
    else:
        feed()


def _read(channel: paramiko.Channel, stdout: Sink, stderr: Sink, deadline: Deadline) -> None:
    """Hand on both streams until both have ended."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        at_end = channel.eof_received or channel.closed
        if channel.recv_ready():
            stdout.write(channel.recv(_READ))
        elif channel.recv_stderr_ready():
            stderr.write(channel.recv_stderr(_READ))
        elif at_end:
            return
        else:
            poll.poll(deadline.remaining() * 1000)


_HERE = ("127.0.0.1", 0)
_WINDOW = 8 << 20
_PROBE = "keepalive@openssh.com"
_PATIENCE_S = 30.0


class _LostBefore(StreamClosed):
    """The connection was lost before a channel was opened over it."""


class SshHost(Closeable):
    """A host to run commands on, exchange files with and reach ports of.

    It connects when first asked to, and again after the connection was lost. A context manager
    that closes its connections, also to the host that it jumps through.
    """

    def __init__(self, config: SshHostConfig) -> None:
        self._config = config
        self._jump = SshHost(config.jump) if config.jump else None
        self._transport: paramiko.Transport | None = None
        self._lock = threading.Lock()
        self._closings = 0

    @classmethod
    def named(cls, asked: str, config_file: Path | None = None) -> Self:
        """Return the host of that name; see `resolve_host`."""
        return cls(resolve_host(asked, config_file))

    @property
    def config(self) -> SshHostConfig:
        """Route by which it is reached."""
        return self._config

    def close(self) -> None:
        """Close the connection; commands over it fail. The next use connects again."""
        self._closings += 1
        transport, self._transport = self._transport, None
        if transport is not None:
            hang_up(transport)
        if self._jump is not None:
            self._jump.close()

    def connect(self) -> None:
        """Connect now, if there is no connection, within the host's own `ConnectTimeout`."""
        timeout_s = self._config.connect_timeout_s
        try:
            self.ensure_connected(Deadline(timeout_s))
        except DeadlineExceeded:
            raise self._too_slow() from None

    def ensure_connected(self, deadline: Deadline) -> paramiko.Transport:
        """Return the connection, made if there is none.

        Raises:
            HostUnreachableError, HostAuthError, HostError
        """
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise DeadlineExceeded
        try:
            transport = self._transport
            if transport is None or not transport.is_active():
                closings = self._closings
                transport = self._transport = self._connect(deadline)
                if self._closings != closings:  # who closed meanwhile saw nothing to close
                    self.close()
                    raise HostUnreachableError(self._config.asked, "it was closed meanwhile")
            return transport
        finally:
            self._lock.release()

    def session(self, deadline: Deadline) -> paramiko.Channel:
        """Return a channel for one command or subsystem; the caller closes it.

        Raises:
            FailReply: the host opens no more.
            StreamClosed: the connection was lost.
            HostUnreachableError and others: see `ensure_connected`.
        """
        return self._open("session", None, deadline)

    def channel_to(self, address: tuple[str, int], deadline: Deadline) -> paramiko.Channel:
        """Return a channel to an address as the host sees it; the caller closes it.

        Raises:
            FailReply: nothing listens there, or the host forwards nothing.
            StreamClosed: the connection was lost.
        """
        return self._open("direct-tcpip", address, deadline)

    def _open(
        self, kind: str, address: tuple[str, int] | None, deadline: Deadline
    ) -> paramiko.Channel:
        try:
            return self._open_on(self.ensure_connected(deadline), kind, address, deadline)
        except _LostBefore:
            # Nobody knew yet; nothing has begun there.
            return self._open_on(self.ensure_connected(deadline), kind, address, deadline)

    def _open_on(
        self,
        transport: paramiko.Transport,
        kind: str,
        address: tuple[str, int] | None,
        deadline: Deadline,
    ) -> paramiko.Channel:
        try:
            return transport.open_channel(
                kind,
                dest_addr=address,
                src_addr=_HERE if address else None,
                window_size=_WINDOW,
                timeout=deadline.remaining(),
            )
        except paramiko.ChannelException as error:
            reason = error.text if address else f"it opens no more sessions: {error.text}"
            raise FailReply(reason) from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            if isinstance(error, EOFError) or not transport.is_active():
                hang_up(transport)
                reason = f"the connection to {self._config.asked} was lost"
                raise _LostBefore(reason) from None
            deadline.remaining()
            raise StreamClosed(str(error) or "the connection was closed") from None

    def _connect(self, deadline: Deadline) -> paramiko.Transport:
        own = Deadline(min(self._config.connect_timeout_s, deadline.remaining()))
        try:
            return connect(self._config, own, self._through())
        except DeadlineExceeded:
            deadline.remaining()
            raise self._too_slow() from None

    def _too_slow(self) -> HostUnreachableError:
        reason = f"no connection within {self._config.connect_timeout_s:g} s"
        return HostUnreachableError(self._config.asked, reason)

    def _through(self) -> OpenChannel | None:
        jump = self._jump
        if jump is None:
            return None

        def open_channel(address: tuple[str, int], deadline: Deadline) -> paramiko.Channel:
            try:
                return jump.channel_to(address, deadline)
            except (FailReply, StreamClosed) as error:
                way = f"from {jump.config.asked} to {address[0]}:{address[1]}"
                raise HostUnreachableError(self._config.asked, f"{way}: {error}") from None

        return open_channel


@contextlib.contextmanager
def closing_by(channel: paramiko.Channel, deadline: Deadline) -> Iterator[None]:
    """Close a channel at the end of the block, and end all waiting on it at the deadline.

    Some of paramiko's waits know no timeout, but all end when the channel closes.

    Raises:
        DeadlineExceeded: in place of errors of the block that follow from it.
        StreamClosed: the channel was closed in the middle by the other side.
        OSError: of the block, while the channel was open.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        hang_up(channel)

    timer: threading.Timer | None = None
    try:
        timer = threading.Timer(deadline.remaining(), end)
        timer.daemon = True
        timer.start()
        yield
    except (
        paramiko.SSHException,
        paramiko.SFTPError,
        EOFError,
        OSError,
        StreamClosed,
    ) as error:
        if over.is_set():
            raise DeadlineExceeded from None
        if channel.closed or not isinstance(error, OSError):
            raise StreamClosed(str(error) or "the connection was closed") from None
        raise
    finally:
        if timer is not None:
            timer.cancel()
        hang_up(channel)


def stands(channel: paramiko.Channel, *, patience_s: float = _PATIENCE_S) -> bool:
    """Return whether the connection of a channel that has ended stands.

    When it is lost, its channels end a moment before it knows of that itself; so the host is asked
    for an answer, be it a refusal. Without one, as when the host was suspended meanwhile, the
    connection counts as lost.
    """
    transport = channel.get_transport()

    def ask() -> None:
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            transport.global_request(_PROBE, wait=True)  # it knows no timeout

    asking = threading.Thread(target=ask, name="ssh probe", daemon=True)
    asking.start()
    asking.join(patience_s)
    return not asking.is_alive() and bool(transport.is_active())
