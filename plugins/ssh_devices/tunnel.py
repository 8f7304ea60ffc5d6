"""Port of this host's loopback that leads to a port of another host, through its connection."""

from collections.abc import Iterator
from contextlib import contextmanager

import paramiko

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import FailReply, StreamClosed
from harness.devices.forward import LOOPBACK, OPEN_TIMEOUT_S, End, Forward
from harness.errors import HarnessError, HostUnreachableError
from plugins.ssh_devices.host import SshHost


class ChannelEnd:
    """A channel of an SSH connection; see `End`."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self.recv = channel.recv
        self.close = channel.close

    def sendall(self, data: bytes) -> None:
        """See `End`."""
        with _as_os_errors():
            self._channel.sendall(data)

    def end_sending(self) -> None:
        """See `End`."""
        with _as_os_errors():
            self._channel.shutdown_write()

    def hang_up(self) -> None:
        """See `End`; a shutdown would not wake a reader."""
        with _as_os_errors():
            self._channel.close()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except paramiko.SSHException as error:
        raise OSError(str(error)) from None


class Tunnel(Forward):
    """Forward to a port of a host's loopback, over its SSH connection.

    It survives the loss of the host's connection: the next one through it connects again.

    Attributes:
        failure: why the last connection through it did not reach the host; `None` if it did.
        refusal: why the host let the last connection go no further; empty if it did.
    """

    def __init__(self, host: SshHost, port: int) -> None:
        self._host = host
        self._port = port
        self.failure: HarnessError | None = None
        self.refusal = ""
        super().__init__(self._open_channel, f"tunnel {port}")

    def open_end(self) -> End | None:
        """Connect to the host's port; if that fails, `failure` or `refusal` says why."""
        failure: HarnessError | None = None
        refusal = ""
        end = None
        try:
            end = self._connect(Deadline(OPEN_TIMEOUT_S))
        except HarnessError as error:
            failure = error
        except FailReply as error:
            refusal = str(error)
        except (DeadlineExceeded, StreamClosed, OSError) as error:
            reason = str(error) or f"no answer within {OPEN_TIMEOUT_S:g} s"
            failure = HostUnreachableError(self._host.config.asked, reason)
        self.failure, self.refusal = failure, refusal
        return end

    def _open_channel(self, deadline: Deadline) -> ChannelEnd:
        return ChannelEnd(self._host.channel_to((LOOPBACK, self._port), deadline))
