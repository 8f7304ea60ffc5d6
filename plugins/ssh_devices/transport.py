"""Way to a Linux machine over SSH and SFTP, e.g. a board with a Snapdragon."""

import errno
import os
import shlex
import stat as stat_bits
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import BinaryIO

import paramiko
from paramiko.sftp import CMD_DATA, CMD_READ, int64

from harness.clock import Deadline
from harness.devices.base import Progress, StreamClosed
from harness.devices.commands import Sink
from harness.devices.device import Device
from harness.devices.posix import PosixTransport
from harness.errors import DeviceLostError, DeviceUnsupportedError
from plugins.ssh_devices.host import SshHost, closing_by, run, stands
from plugins.ssh_devices.tunnel import Tunnel

_REQUEST = 192 * 1024
"""An OpenSSH server takes packets of 256 KiB; before version 8.5 it answers with at most 64 KiB."""
_LEAST_REQUEST = 32 * 1024
"""What every server answers in one piece."""
_ASKED_AHEAD = 8


class _Client(paramiko.SFTPClient):
    """Client that reads files by requests which do not wait for the answers to those before.

    `SFTPFile.prefetch` does so in a thread, which prints a traceback when the connection ends, and
    keeps a whole file in memory if its server answers with less than was asked for.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        super().__init__(channel)
        self._answers: dict[int, bytes | Exception] = {}

    def pieces(self, file: paramiko.SFTPFile, size: int) -> Iterator[bytes]:
        """Yield the content of a file up to its end; `size` is the expected one."""
        requests: deque[tuple[int, int, int]] = deque()
        offset, step = 0, _REQUEST
        while True:
            while not requests or (offset < size and len(requests) < _ASKED_AHEAD):
                requests.append((self._ask(file, offset, step), offset, step))
                offset += step
            number, begin, length = requests.popleft()
            while number not in self._answers:
                self._read_response()  # type: ignore[attr-defined]
            answer = self._answers.pop(number)
            if isinstance(answer, EOFError):
                return
            if isinstance(answer, Exception):
                raise answer
            if not 0 < len(answer) <= length:
                raise OSError(f"it sent {len(answer)} bytes when asked for {length}")
            yield answer
            if len(answer) < length:
                step = max(len(answer), _LEAST_REQUEST)
                begin, length = begin + len(answer), length - len(answer)
                requests.appendleft((self._ask(file, begin, length), begin, length))

    def _ask(self, file: paramiko.SFTPFile, offset: int, length: int) -> int:
        request = self, CMD_READ, file.handle, int64(offset), length
        return int(self._async_request(*request))  # type: ignore[attr-defined]

    def _async_response(self, kind: int, message: paramiko.Message, number: int) -> None:
        """Keep an answer, which paramiko gives to the object that asked."""
        try:
            if kind == CMD_DATA:
                self._answers[number] = message.get_string()
            else:
                self._convert_status(message)  # type: ignore[attr-defined]
                self._answers[number] = OSError("it answered without data")
        except (EOFError, OSError) as status:
            self._answers[number] = status


class SftpFiles:
    """Implements `harness.devices.files.Files`."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    def check(self) -> None:
        """See `Files`."""
        if self._client.sock.closed:
            raise StreamClosed("the connection was closed")

    def make_folder(self, path: str) -> None:
        """See `Files`."""
        mode = self._mode(path)
        if mode is not None:
            if not stat_bits.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
            return
        parent = os.path.dirname(path.rstrip("/"))  # noqa: PTH120 - a path of the device
        if parent and parent != path:
            self.make_folder(parent)
        try:
            self._client.mkdir(_encode(path))
        except OSError:
            mode = self._mode(path)  # somebody may have made it meanwhile
            if mode is None or not stat_bits.S_ISDIR(mode):
                raise

    def write(self, path: str, pieces: Iterator[bytes]) -> None:
        """See `Files`."""
        with self._client.open(_encode(path), "wxb") as file:
            file.MAX_REQUEST_SIZE = _REQUEST
            file.set_pipelined(pipelined=True)
            for piece in pieces:
                file.write(piece)

    def read(self, path: str, sink: BinaryIO, on_progress: Progress | None) -> int:
        """See `Files`."""
        status = self._client.stat(_encode(path))
        if status.st_mode is None or not stat_bits.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        total = 0
        with self._client.open(_encode(path), "rb") as file:
            for piece in self._client.pieces(file, status.st_size or 0):
                sink.write(piece)
                total += len(piece)
                if on_progress:
                    on_progress(len(piece))
        if total < (status.st_size or 0):
            raise OSError(f"it ended after {total} of {status.st_size} bytes")
        return total

    def size(self, path: str) -> int | None:
        """See `Files`."""
        try:
            status = self._client.lstat(_encode(path))
        except FileNotFoundError:
            return None
        regular = status.st_mode is not None and stat_bits.S_ISREG(status.st_mode)
        return status.st_size if regular else None

    def settle(self, temporary: str, path: str, mode: int, mtime: int) -> None:
        """See `Files`."""
        self._client.chmod(_encode(temporary), mode)
        self._client.utime(_encode(temporary), (mtime, mtime))
        try:
            self._client.posix_rename(_encode(temporary), _encode(path))
        except OSError as error:
            there = self._mode(path) if error.errno is None else None
            if there is not None and stat_bits.S_ISDIR(there):
                raise IsADirectoryError(errno.EISDIR, "it is a folder") from None
            raise

    def remove(self, path: str) -> None:
        """See `Files`."""
        self._client.remove(_encode(path))

    def _mode(self, path: str) -> int | None:
        try:
            return self._client.stat(_encode(path)).st_mode
        except FileNotFoundError:
            return None


@contextmanager
def sftp_files(host: SshHost, deadline: Deadline) -> Iterator[SftpFiles]:
    """Yield the file system of a host until the end of the block.

    Raises:
        StreamClosed, DeadlineExceeded: also in place of errors that follow from them.
        DeviceUnsupportedError: the host offers no SFTP, or none that works.
    """
    channel = host.session(deadline)
    with closing_by(channel, deadline):
        yield SftpFiles(_client(host, channel, deadline))


def _client(host: SshHost, channel: paramiko.Channel, deadline: Deadline) -> _Client:
    try:
        channel.invoke_subsystem("sftp")
        return _Client(channel)
    except (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError) as error:
        deadline.remaining()
        if not stands(channel):
            raise
        reason = f"its SSH server offers no SFTP that works: {error}"
        raise DeviceUnsupportedError(
            host.config.asked, "sending and fetching files", reason
        ) from None


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


_REBOOT = 'if [ "$(id -u)" = 0 ]; then reboot; else sudo -n reboot; fi'


class SshTransport(PosixTransport):
    """Way to a Linux machine over SSH and SFTP.

    The connection is the host's, and its owner closes it; it is made anew when it was lost.
    """

    def __init__(self, host: SshHost) -> None:
        super().__init__(host.config.asked, "linux")
        self._host = host

    def execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        """Run a script as a session's leader, which an SSH server makes it, under any shell."""
        line = f"exec {shlex.join(['sh', '-c', script])}"
        return run(self._host, line, stdin, stdout, stderr, deadline)

    def forward(self, port: int) -> Tunnel:
        """Open a tunnel to a port of its loopback; see `Transport.forward`."""
        return Tunnel(self._host, port)

    def reboot(self, device: Device, timeout_s: float) -> None:
        """Run `reboot`; see `Transport.reboot`."""
        with suppress(DeviceLostError):  # it may be faster than its answer
            device.shell(_REBOOT, timeout_s=timeout_s)

    def _files(self, deadline: Deadline) -> AbstractContextManager[SftpFiles]:
        return sftp_files(self._host, deadline)
