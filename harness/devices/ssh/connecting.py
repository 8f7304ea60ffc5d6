"""From a host's name to an authenticated connection, all within one deadline."""

import contextlib
import logging
import socket
from collections.abc import Callable

import paramiko

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.ssh.authentication import authenticate
from harness.devices.ssh.config import HostConfig
from harness.devices.ssh.host_keys import algorithms, check_host_key, known_keys
from harness.errors import HostConfigError, HostUnreachableError

_SILENCE_MS = 30_000
_LOG = "harness.devices.ssh.paramiko"

OpenChannel = Callable[[tuple[str, int], Deadline], paramiko.Channel]
"""Opens a channel to an address as seen from the jump host."""


def connect(host: HostConfig, deadline: Deadline, jump: OpenChannel | None) -> paramiko.Transport:
    """A connection that the caller closes.

    Raises:
        HostUnreachableError, HostKeyError, HostAuthError, HostConfigError
        DeadlineExceeded: the time is over.
    """
    known = known_keys(host)
    link = _link(host, deadline, jump)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(hang_up, link)  # a transport that has not begun yet leaves it open
        try:
            transport = paramiko.Transport(link)
        except (paramiko.SSHException, OSError) as error:
            raise HostUnreachableError(host.asked, str(error)) from None
        on_failure.callback(hang_up, transport)
        _establish(transport, host, known, deadline)
        authenticate(transport, host, deadline)
        transport.set_keepalive(host.keepalive_s)
        on_failure.pop_all()
    return transport


def hang_up(end: paramiko.Transport | paramiko.Channel | socket.socket) -> None:
    """Close it, also where the connection that it goes over was lost a moment ago."""
    with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
        end.close()


def _establish(
    transport: paramiko.Transport, host: HostConfig, known: list[paramiko.PKey], deadline: Deadline
) -> None:
    """Agree on keys, and see that the host is who it should be."""
    # What goes wrong is raised to us; without a handler, logging would print it as well.
    logging.getLogger(_LOG).addHandler(logging.NullHandler())
    transport.set_log_channel(_LOG)
    transport.daemon = True
    options = transport.get_security_options()
    options.key_types = algorithms(known, options.key_types)
    left = deadline.remaining()
    transport.banner_timeout = transport.handshake_timeout = left
    try:
        transport.start_client(timeout=left)
    except (paramiko.SSHException, OSError, EOFError) as error:
        deadline.remaining()
        reason = str(error) or "it hung up"
        raise HostUnreachableError(host.asked, reason) from None
    deadline.remaining()  # it returns also when the time is over
    check_host_key(host, known, transport.get_remote_server_key())


def _link(
    host: HostConfig, deadline: Deadline, jump: OpenChannel | None
) -> socket.socket | paramiko.Channel:
    address = host.hostname, host.port
    if jump is not None:
        return jump(address, deadline)
    try:
        link = socket.create_connection(address, deadline.remaining())
    except TimeoutError:
        raise DeadlineExceeded from None
    except UnicodeError as error:
        raise HostConfigError(host.asked, f"its HostName cannot be one: {error}") from None
    except OSError as error:
        raise HostUnreachableError(host.asked, f"{host.hostname}:{host.port}: {error}") from None
    with contextlib.suppress(OSError, AttributeError):  # not on every system, nor once it is lost
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that is suspended answers nothing, and writes to it shall not wait for ever.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    return link
