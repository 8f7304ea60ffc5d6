"""SSH connections: link, host key check and key authentication within one deadline."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EOF
from paramiko.pkey import PublicBlob

from harness.clock import Deadline, DeadlineExceeded
from harness.errors import HostAuthError, HostError, HostUnreachableError, one_line
from plugins.ssh_devices.config import SshHostConfig
from plugins.ssh_devices.host_keys import KnownKeys, algorithms, check_host_key, known_keys


def authenticate(transport: paramiko.Transport, host: SshHostConfig, deadline: Deadline) -> None:
    """Offer keys until the host takes one."""
    remarks: list[str] = []
    count = 0
    agent = _agent(remarks)
    try:
        for key in _keys(host, agent, remarks):
            transport.auth_timeout = deadline.remaining()
            count += 1
            try:
                transport.auth_publickey(host.user, key)
            except paramiko.SSHException as error:
                if not transport.is_active():
                    remarks.append(
                        f"it hung up after {count} keys: name the right one with "
                        "IdentityFile and IdentitiesOnly"
                    )
                    break
                if not isinstance(error, paramiko.AuthenticationException):
                    remarks.append(str(error))
            if transport.is_authenticated():
                return
    finally:
        if agent is not None:
            agent.close()
    deadline.remaining()
    details = "".join(f"; {remark}" for remark in remarks)
    raise HostAuthError(
        host.asked,
        f"it does not let {host.user} in: it accepted none of {count} keys{details}",
    )


class _Refusable(paramiko.AgentKey):
    """A key of the agent, which may refuse to use it: locked, or nobody there to confirm.

    Told by an exception, that would end the connection, with the other keys not tried.
    """

    def __init__(self, key: paramiko.AgentKey, remarks: list[str]) -> None:
        super().__init__(key.agent, key.blob, key.comment)
        self._remarks = remarks

    def sign_ssh_data(  # type: ignore[override]  # bytes, whatever its stubs say
        self, data: bytes, algorithm: str | None = None
    ) -> bytes:
        """Return a signature, or none that any host would accept."""
        try:
            return bytes(super().sign_ssh_data(data, algorithm))
        except (paramiko.SSHException, OSError, EOFError) as error:
            name = self.comment or self.fingerprint
            self._remarks.append(f"the SSH agent does not sign with its key {name}: {error}")
            return b""


class _Agent(paramiko.Agent):
    """The user's agent; unlike paramiko's, it leaves no socket behind where it is of no use."""

    def __init__(self) -> None:
        path = os.environ.get("SSH_AUTH_SOCK")
        if path:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        try:
            super().__init__()
        except BaseException:
            self.close()
            raise


def _agent(remarks: list[str]) -> paramiko.Agent | None:
    try:
        return _Agent()
    except (paramiko.SSHException, OSError, ValueError) as error:
        remarks.append(f"the SSH agent cannot be used: {error}")
        return None


def _keys(
    host: SshHostConfig, agent: paramiko.Agent | None, remarks: list[str]
) -> Iterator[paramiko.PKey]:
    public = {blob for file in host.key_files if (blob := _public_blob(file))}
    agent_keys = [_Refusable(key, remarks) for key in agent.get_keys()] if agent else []
    blobs: set[bytes] = set()
    preferred = [key for key in agent_keys if key.asbytes() in public]
    others = (
        [] if host.only_these_keys else [key for key in agent_keys if key.asbytes() not in public]
    )
    for agent_key in preferred + others:
        blobs.add(agent_key.asbytes())
        yield agent_key
    for file in host.key_files:
        key = _load(file, blobs, remarks)
        if key is not None and key.asbytes() not in blobs:
            yield key


def _load(file: Path, seen: set[bytes], remarks: list[str]) -> paramiko.PKey | None:
    if _public_blob(file) in seen:
        return None
    try:
        return paramiko.PKey.from_path(file)
    except FileNotFoundError:
        return None
    except (TypeError, paramiko.PasswordRequiredException):
        remarks.append(f"{file} has a passphrase: give it to the agent with ssh-add")
    except (OSError, ValueError, UnsupportedAlgorithm, paramiko.SSHException) as error:
        remarks.append(f"{file} cannot be used: {error}")
    return None


def _public_blob(file: Path) -> bytes | None:
    """Return the public half beside a private key, as an agent gives it."""
    try:
        return PublicBlob.from_file(f"{file}.pub").key_blob
    except (OSError, ValueError, UnicodeDecodeError):
        return None


_SILENCE_MS = 30_000
_COMMAND_END_S = 1.0
_COMMAND_TAIL = 4096
_LOG = "plugins.ssh_devices.paramiko"

OpenChannel = Callable[[tuple[str, int], Deadline], paramiko.Channel]
"""Opens a channel to an address as seen from the jump host."""


def connect(
    host: SshHostConfig, deadline: Deadline, jump: OpenChannel | None
) -> paramiko.Transport:
    """Return a connection that the caller closes.

    Raises:
        HostUnreachableError, HostAuthError, HostError
        DeadlineExceeded: the time is over.
    """
    host_keys = known_keys(host)
    link = _link(host, deadline, jump)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(hang_up, link)  # a transport that has not begun yet leaves it open
        try:
            transport = _Transport(link)
        except (paramiko.SSHException, OSError) as error:
            raise HostUnreachableError(host.asked, str(error)) from None
        on_failure.callback(hang_up, transport)
        _establish(transport, host, host_keys, deadline)
        authenticate(transport, host, deadline)
        transport.set_keepalive(host.keepalive_s)
        on_failure.pop_all()
    return transport


class _Transport(paramiko.Transport):
    """Transport that sends nothing over a channel after the channel's end.

    paramiko makes a message while it holds the lock of its channel, and sends it afterwards: the
    answer to the host's "close" may overtake it. OpenSSH ends the whole connection, with all other
    channels, for the end of an input or for data of a channel that is no more.
    """

    def __init__(self, link: socket.socket | paramiko.Channel) -> None:
        self._sending = threading.Lock()
        super().__init__(link)

    def _send_user_message(self, data: paramiko.Message) -> None:
        with self._sending:
            if not self._is_late(data.asbytes()):
                super()._send_user_message(data)  # type: ignore[misc]

    def _is_late(self, message: bytes) -> bool:
        if message[0] not in {MSG_CHANNEL_DATA, MSG_CHANNEL_EOF}:
            return False
        recipient = int.from_bytes(message[1:5], "big")
        open_channels = self._channels.values()  # type: ignore[attr-defined]
        return all(channel.remote_chanid != recipient for channel in open_channels)


def hang_up(end: paramiko.Transport | paramiko.Channel | socket.socket) -> None:
    """Close it, also where the connection that it goes over was lost a moment ago."""
    with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
        end.close()


def _establish(
    transport: paramiko.Transport, host: SshHostConfig, known: KnownKeys, deadline: Deadline
) -> None:
    """Agree on keys, and check the host's key."""
    # What goes wrong is raised to us; without a handler, logging would print it as well.
    logging.getLogger(_LOG).addHandler(logging.NullHandler())
    transport.set_log_channel(_LOG)
    transport.daemon = True
    options = transport.get_security_options()
    options.key_types = algorithms(known.trusted, options.key_types)
    left_s = deadline.remaining()
    transport.banner_timeout = transport.handshake_timeout = left_s
    try:
        transport.start_client(timeout=left_s)
    except (paramiko.SSHException, OSError, EOFError) as error:
        deadline.remaining()
        link = transport.sock
        last_words = link.last_words() if isinstance(link, _CommandLink) else ""
        reason = last_words or str(error) or "it hung up"
        raise HostUnreachableError(host.asked, reason) from None
    deadline.remaining()  # it returns also when the time is over
    check_host_key(host, known, transport.get_remote_server_key())


def _link(
    host: SshHostConfig, deadline: Deadline, jump: OpenChannel | None
) -> socket.socket | paramiko.Channel:
    address = host.hostname, host.port
    if jump is not None:
        return jump(address, deadline)
    if host.proxy_command:
        try:
            return _CommandLink(host.proxy_command)
        except OSError as error:
            raise HostUnreachableError(host.asked, f"its ProxyCommand: {error}") from None
    try:
        link = socket.create_connection(address, deadline.remaining())
    except TimeoutError:
        raise DeadlineExceeded from None
    except UnicodeError as error:
        raise HostError(host.asked, f"its HostName cannot be one: {error}") from None
    except OSError as error:
        raise HostUnreachableError(host.asked, f"{host.hostname}:{host.port}: {error}") from None
    with contextlib.suppress(OSError, AttributeError):  # not on every system, nor once it is lost
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that is suspended answers nothing, and writes to it shall not wait for ever.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    return link


class _CommandLink(socket.socket):
    """Link to a host through its `ProxyCommand`: a socket that is the command's input and output.

    The command ends with it.
    """

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # it can ask nobody, and Ctrl-C is not meant for it
            )
            super().__init__(fileno=ours.detach())
        self._said = b""
        self._listener = threading.Thread(target=self._listen, name="ProxyCommand", daemon=True)
        try:
            self._listener.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it, and end the command."""
        super().close()
        for number in (signal.SIGHUP, signal.SIGKILL):
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self._process.pid, number)
                    self._process.wait(_COMMAND_END_S)

    def last_words(self) -> str:
        """Return how the command ended and its stderr; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_COMMAND_END_S)
            self._listener.join(_COMMAND_END_S)
            text = one_line(self._said.decode("utf-8", "replace"))
            return f"its ProxyCommand ended with status {status}" + (f": {text}" if text else "")
        return ""

    def _listen(self) -> None:
        """Keep the end of the command's stderr."""
        stderr = self._process.stderr
        assert stderr is not None  # noqa: S101 - as it was started
        with stderr:
            while data := os.read(stderr.fileno(), _COMMAND_TAIL):
                self._said = (self._said + data)[-_COMMAND_TAIL:]
