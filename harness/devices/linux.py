"""A Linux machine over SSH, e.g. a board with a Snapdragon."""

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

from harness.clock import Deadline
from harness.devices.commands import Sink
from harness.devices.posix_device import PosixDevice
from harness.devices.sftp_files import SftpFiles, sftp_files
from harness.devices.shell_device import forwarded_port
from harness.devices.ssh.command import run
from harness.devices.ssh.host import SshHost
from harness.devices.ssh.tunnel import Tunnel
from harness.errors import DeviceLostError

_REBOOT = 'if [ "$(id -u)" = 0 ]; then reboot; else sudo -n reboot; fi'


class LinuxDevice(PosixDevice):
    """A host over SSH and SFTP; implements `harness.devices.base.Device`.

    The connection is the host's, and its owner closes it; it is made anew when it was lost.
    """

    _keep_shell: ClassVar[bool] = True

    def __init__(self, host: SshHost) -> None:
        super().__init__(host.config.asked)
        self._host = host

    def __repr__(self) -> str:
        return f"LinuxDevice({self.serial!r})"

    @property
    def type(self) -> str:
        """`linux`."""
        return "linux"

    @contextmanager
    def forward(self, remote: str) -> Iterator[tuple[str, int]]:
        """A tunnel to a port of its loopback; see `Device.forward`."""
        with Tunnel(self._host, forwarded_port(remote)) as tunnel:
            yield tunnel.address

    def _execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        # The user's shell may be any; an SSH server makes it the leader of a session.
        line = f"exec {shlex.join(['sh', '-c', script])}"
        return run(self._host, line, stdin, stdout, stderr, deadline)

    def _files(self, deadline: Deadline) -> AbstractContextManager[SftpFiles]:
        return sftp_files(self._host, deadline)

    def _ask_to_reboot(self, timeout_s: float) -> None:
        try:
            self.shell(_REBOOT, timeout_s=timeout_s)
        except DeviceLostError:
            return  # it was faster than its answer
