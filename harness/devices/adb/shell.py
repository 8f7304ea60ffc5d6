"""adb's shell protocol v2: output, errors, exit status and input of a command.

Protocol: AOSP `packages/modules/adb/shell_protocol.h`: packets of a one-byte kind, a
little-endian 32-bit length, and that many bytes.
"""

import enum
import struct

from harness.devices.adb.connection import Connection, StreamClosed
from harness.devices.commands import Sink

_HEADER = struct.Struct("<BI")
_STDIN_PACKET = 16 * 1024
_READ = 256 * 1024


class _Kind(enum.IntEnum):
    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    CLOSE_STDIN = 4


class ShellSession:
    """A running command on an open `shell,v2,raw:` service.

    `stdout` and `stderr` get what the command writes, as it comes.
    """

    def __init__(self, connection: Connection, stdout: Sink, stderr: Sink) -> None:
        self._connection = connection
        self._stdout = stdout
        self._stderr = stderr
        self._header = bytearray()
        self._kind = -1
        self._left = 0

    def run(self, stdin: bytes | None = None) -> int:
        """Feed `stdin`, hand on the output until the command ends; gives its exit status.

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
                self._stdout.write(piece)
            elif self._kind == _Kind.STDERR:
                self._stderr.write(piece)
        return None


def _input_packets(stdin: bytes) -> bytes:
    packets = bytearray()
    for start in range(0, len(stdin), _STDIN_PACKET):
        piece = stdin[start : start + _STDIN_PACKET]
        packets += _HEADER.pack(_Kind.STDIN, len(piece)) + piece
    packets += _HEADER.pack(_Kind.CLOSE_STDIN, 0)
    return bytes(packets)
