"""The shell v2 protocol: a command's output, errors, exit status and input, kept apart.

Protocol: AOSP `packages/modules/adb/shell_protocol.h`: packets of a one-byte kind, a
little-endian 32-bit length, and that many bytes.
"""

import enum
import re
import shlex
import struct
from collections.abc import Mapping, Sequence

from harness.adb.connection import Connection, StreamClosed

_HEADER = struct.Struct("<BI")
_STDIN_PACKET = 16 * 1024
_READ = 256 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Kind(enum.IntEnum):
    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    CLOSE_STDIN = 4


def command_line(command: str | Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What to hand to the device's shell for a script, or for the words of one command.

    Raises:
        ValueError: a NUL, which no command can hold, or a bad variable name.
    """
    text = command if isinstance(command, str) else shlex.join(command)
    exports = []
    for name, value in (env or {}).items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        exports.append(f"export {name}={shlex.quote(value)}; ")
    line = "".join(exports) + text
    if "\0" in line:
        raise ValueError("a command cannot hold a NUL")
    return line


class BoundedOutput:
    """Keeps the beginning and the end of a stream, and counts what it left out between them."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take what the stream brought."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            self._trim()

    def _trim(self) -> None:
        excess = max(0, len(self._tail) - self._half)
        self.dropped += excess
        del self._tail[:excess]

    def text(self) -> str:
        """What was kept, as text; a line in the middle tells what was not."""
        self._trim()
        if not self.dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        note = f"\n[... {self.dropped} bytes left out ...]\n"
        return self._head.decode("utf-8", "replace") + note + self._tail.decode("utf-8", "replace")


class ShellSession:
    """A running command on an open `shell,v2,raw:` service.

    Attributes:
        stdout: what the command has written so far; there even when `run` raises.
        stderr: likewise.
    """

    def __init__(self, connection: Connection, *, max_output: int) -> None:
        self._connection = connection
        self.stdout = BoundedOutput(max_output)
        self.stderr = BoundedOutput(max_output)
        self._header = bytearray()
        self._kind = -1
        self._left = 0

    def run(self, stdin: bytes | None = None) -> int:
        """Feed `stdin`, gather the output until the command ends; gives its exit status.

        Raises:
            StreamClosed: the connection ended before the command.
            DeadlineExceeded: the connection's time is over.
        """
        outgoing = memoryview(_input_packets(stdin or b""))
        while True:
            readable, writable = self._connection.wait(readable=True, writable=bool(outgoing))
            if readable:
                status = self._feed(self._connection.receive_some(_READ))
                if status is not None:
                    return status
            if writable:
                try:
                    outgoing = outgoing[self._connection.send_some(outgoing) :]
                except StreamClosed:
                    outgoing = outgoing[:0]  # what was written before may still have to be read

    def _feed(self, data: bytes) -> int | None:
        """Take a piece of the stream of packets; gives the exit status once it is there."""
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) < _HEADER.size:
                    return None
                self._kind, self._left = _HEADER.unpack(self._header)
                self._header.clear()
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._kind == _Kind.EXIT:
                return piece[0]
            if self._kind == _Kind.STDOUT:
                self.stdout.write(piece)
            elif self._kind == _Kind.STDERR:
                self.stderr.write(piece)
        return None


def _input_packets(stdin: bytes) -> bytes:
    packets = bytearray()
    for start in range(0, len(stdin), _STDIN_PACKET):
        piece = stdin[start : start + _STDIN_PACKET]
        packets += _HEADER.pack(_Kind.STDIN, len(piece)) + piece
    packets += _HEADER.pack(_Kind.CLOSE_STDIN, 0)
    return bytes(packets)
