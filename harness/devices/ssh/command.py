"""One command on a host, with its streams kept apart."""

import contextlib
import select
import threading
from typing import Protocol

import paramiko

from harness.clock import Deadline
from harness.devices.adb.connection import StreamClosed
from harness.devices.ssh.host import SshHost, closing_by, stands

_READ = 256 * 1024
_KILLED = 128 + 9


class Writer(Protocol):
    """Takes a stream as it comes."""

    def write(self, data: bytes, /) -> object:
        """Take the next bytes."""
        ...


def run(
    host: SshHost,
    line: str,
    stdin: bytes | None,
    stdout: Writer,
    stderr: Writer,
    deadline: Deadline,
) -> int:
    """Have the user's shell there run `line`; gives its exit status, 137 when it was killed.

    Raises:
        StreamClosed: the connection ended before the command.
        DeadlineExceeded: the time is over.
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


def _read(channel: paramiko.Channel, stdout: Writer, stderr: Writer, deadline: Deadline) -> None:
    """Hand on both streams until both have ended."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ended = channel.eof_received or channel.closed
        if channel.recv_ready():
            stdout.write(channel.recv(_READ))
        elif channel.recv_stderr_ready():
            stderr.write(channel.recv_stderr(_READ))
        elif ended:
            return
        else:
            poll.poll(deadline.remaining() * 1000)
