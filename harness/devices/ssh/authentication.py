"""Getting in with the user's keys, the agent's first; nobody is asked for passwords."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.pkey import PublicBlob

from harness.clock import Deadline
from harness.devices.ssh.config import HostConfig
from harness.errors import HostAuthError


def authenticate(transport: paramiko.Transport, host: HostConfig, deadline: Deadline) -> None:
    """Offer keys until the host takes one.

    Raises:
        HostAuthError: it takes none.
        DeadlineExceeded: the time is over.
    """
    remarks: list[str] = []
    offered = 0
    agent = _agent(remarks)
    try:
        for key in _keys(host, agent, remarks):
            transport.auth_timeout = deadline.remaining()
            offered += 1
            try:
                transport.auth_publickey(host.user, key)
            except paramiko.SSHException as error:
                if not transport.is_active():
                    remarks.append(
                        f"it hung up after {offered} keys: name the right one with "
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
    said = "".join(f"; {remark}" for remark in remarks)
    raise HostAuthError(host.asked, host.user, f"it accepted none of {offered} keys{said}")


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
        """A signature, or none that any host would accept."""
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
    host: HostConfig, agent: paramiko.Agent | None, remarks: list[str]
) -> Iterator[paramiko.PKey]:
    named = {blob for file in host.key_files if (blob := _public_blob(file))}
    held = [_Refusable(key, remarks) for key in agent.get_keys()] if agent else []
    seen: set[bytes] = set()
    preferred = [key for key in held if key.asbytes() in named]
    others = [] if host.only_these_keys else [key for key in held if key.asbytes() not in named]
    for agent_key in preferred + others:
        seen.add(agent_key.asbytes())
        yield agent_key
    for file in host.key_files:
        key = _load(file, seen, remarks)
        if key is not None and key.asbytes() not in seen:
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
    """The public half beside a private key, as an agent gives it."""
    try:
        return PublicBlob.from_file(f"{file}.pub").key_blob
    except (OSError, ValueError, UnicodeDecodeError):
        return None
