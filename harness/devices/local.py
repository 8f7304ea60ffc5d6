"""This machine as a device: commands are child processes, files are its own."""

import contextlib
import errno
import os
import selectors
import signal
import socket
import stat as stat_bits
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import Progress
from harness.devices.commands import Sink
from harness.devices.device import Device
from harness.devices.files import CHUNK
from harness.devices.forward import LOOPBACK, Forward, SocketEnd
from harness.devices.posix import PosixTransport
from harness.errors import DeviceUnsupportedError


class HereFiles:
    """Implements `harness.devices.files.Files`."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def check(self) -> None:
        """See `Files`."""

    def make_folder(self, path: str) -> None:
        """See `Files`."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, pieces: Iterator[bytes]) -> None:
        """See `Files`."""
        with Path(path).open("xb") as file:
            for piece in pieces:
                self._deadline.remaining()
                file.write(piece)

    def read(self, path: str, sink: BinaryIO, on_progress: Progress | None) -> int:
        """See `Files`."""
        total = 0
        # A pipe would have us wait for a writer, without this flag.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            if not stat_bits.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            while piece := file.read(CHUNK):
                self._deadline.remaining()
                sink.write(piece)
                total += len(piece)
                if on_progress:
                    on_progress(len(piece))
        return total

    def size(self, path: str) -> int | None:
        """See `Files`."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        return status.st_size if stat_bits.S_ISREG(status.st_mode) else None

    def settle(self, temporary: str, path: str, mode: int, mtime: int) -> None:
        """See `Files`."""
        file = Path(temporary)
        file.chmod(mode)
        os.utime(file, (mtime, mtime))
        file.replace(path)

    def remove(self, path: str) -> None:
        """See `Files`."""
        Path(path).unlink()


_READ = 256 * 1024
_WRITE = 4096  # what a pipe that is ready takes without waiting


class LocalTransport(PosixTransport):
    """Way to this machine: child processes, and its file system."""

    def __init__(self) -> None:
        super().__init__("local", "local")

    def execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        """Run a script as a child process; see `Transport.execute`."""
        process = subprocess.Popen(
            [b"/bin/sh", b"-c", script.encode("utf-8", "surrogateescape")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
        with contextlib.closing(_Pipes(process)) as pipes:
            try:
                pipes.exchange(stdin or b"", stdout, stderr, deadline)
                status = process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                raise DeadlineExceeded from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return status if status >= 0 else 128 - status

    def forward(self, port: int) -> Forward:
        """Carry connections to a port of its own; see `Transport.forward`."""

        def connect(deadline: Deadline) -> SocketEnd:
            return SocketEnd(socket.create_connection((LOOPBACK, port), deadline.remaining()))

        return Forward(connect, "forward local")

    def reboot(self, device: Device, timeout_s: float) -> None:  # noqa: ARG002
        """Raise `DeviceUnsupportedError`."""
        raise DeviceUnsupportedError(self.serial, "reboot", "this program runs on it")

    @contextmanager
    def _files(self, deadline: Deadline) -> Iterator[HereFiles]:
        yield HereFiles(deadline)


class _Pipes:
    """The three pipes of a child process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None  # noqa: S101 - as it was started
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stderr = process.stderr

    def close(self) -> None:
        """Close all pipes."""
        for pipe in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()

    def exchange(self, stdin: bytes, stdout: Sink, stderr: Sink, deadline: Deadline) -> None:
        """Feed the child, and hand on its output until it has closed both streams."""
        sinks = {self._stdout.fileno(): stdout, self._stderr.fileno(): stderr}
        feeding = self._stdin.fileno()
        rest = memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            for number in sinks:
                selector.register(number, selectors.EVENT_READ)
            if rest:
                selector.register(feeding, selectors.EVENT_WRITE)
            else:
                self._stdin.close()
            while sinks:
                for key, _ in selector.select(deadline.remaining()):
                    if key.fd == feeding and not self._stdin.closed:
                        rest = self._feed(rest)
                        if not rest:
                            selector.unregister(feeding)
                            self._stdin.close()
                    elif data := os.read(key.fd, _READ):
                        sinks[key.fd].write(data)
                    else:
                        selector.unregister(key.fd)
                        del sinks[key.fd]

    def _feed(self, left: memoryview) -> memoryview:
        try:
            return left[os.write(self._stdin.fileno(), left[:_WRITE]) :]
        except OSError:
            return left[:0]  # it does not want it any more
