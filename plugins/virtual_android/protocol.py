"""Messages of the ADB transport: 24 bytes of header and a payload.

Source of the format: `protocol.txt` in AOSP's packages/modules/adb. All integers are little-endian.
A header is command, arg0, arg1, payload length, payload checksum, command ^ 0xffffffff.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from harness.errors import AdbProtocolError

VERSION_WITH_CHECKSUMS = 0x01000000
VERSION_WITHOUT_CHECKSUMS = 0x01000001
MIN_PAYLOAD = 4096
"""Payload limit of the oldest peers, and of every peer that has not authenticated yet."""
MAX_PAYLOAD = 1024 * 1024
HEADER_SIZE = 24

_HEADER = struct.Struct("<6I")
_MASK = 0xFFFFFFFF


class AdbCommand(IntEnum):
    """Command of a message; the number spells the name in ASCII."""

    CNXN = 0x4E584E43
    AUTH = 0x48545541
    OPEN = 0x4E45504F
    OKAY = 0x59414B4F
    WRTE = 0x45545257
    CLSE = 0x45534C43


@dataclass(frozen=True, slots=True)
class Header:
    """A header that passed all checks which need no payload."""

    command: AdbCommand
    arg0: int
    arg1: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Message:
    """One whole message. The receiver owns the payload."""

    command: AdbCommand
    arg0: int
    arg1: int
    payload: bytes | bytearray = b""


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """Sum of the payload's bytes (the protocol text calls it a CRC)."""
    return sum(payload) & _MASK


def pack_header(
    command: AdbCommand,
    arg0: int,
    arg1: int,
    payload: bytes | bytearray | memoryview,
    *,
    with_checksum: bool,
) -> bytes:
    """Return the 24 bytes that go before `payload`."""
    check = checksum(payload) if with_checksum else 0
    return _HEADER.pack(command, arg0, arg1, len(payload), check, command ^ _MASK)


def unpack_header(data: bytes | bytearray | memoryview, max_payload: int) -> Header:
    """Read a header from untrusted bytes."""
    number, arg0, arg1, length, check, magic = _HEADER.unpack(data)
    if number ^ _MASK != magic:
        raise AdbProtocolError(f"bad magic {magic:#010x} for command {number:#010x}")
    try:
        command = AdbCommand(number)
    except ValueError:
        raise AdbProtocolError(f"unknown command {number:#010x}") from None
    if length > max_payload:
        raise AdbProtocolError(
            f"{command.name} with {length} bytes of payload, above the limit of {max_payload}"
        )
    return Header(command, arg0, arg1, length, check)


class FrameDecoder:
    """Cuts a byte stream into messages without copying payloads.

    The caller receives straight into `buffer()` and tells `commit()` how much came. Each payload
    is a fresh `bytearray` that leaves with its message.

    Attributes:
        max_payload: largest payload accepted from now on.
        peer_version: as announced; decides whether checksums are verified. A `CNXN`
            message is judged by the version it announces itself.
    """

    def __init__(self, max_payload: int = MIN_PAYLOAD) -> None:
        self.max_payload = max_payload
        self.peer_version = VERSION_WITH_CHECKSUMS
        self._head = bytearray(HEADER_SIZE)
        self._header: Header | None = None
        self._payload = bytearray()
        self._filled = 0

    def buffer(self) -> memoryview:
        """Return the buffer that the next bytes belong into; never empty."""
        target = self._head if self._header is None else self._payload
        return memoryview(target)[self._filled :]

    def commit(self, count: int) -> Message | None:
        """Take `count` bytes that were put into `buffer()`; the message they complete, if any."""
        self._filled += count
        if self._header is None:
            if self._filled < HEADER_SIZE:
                return None
            self._header = unpack_header(self._head, self.max_payload)
            self._payload = bytearray(self._header.length)
            self._filled = 0
        if self._filled < self._header.length:
            return None
        return self._complete(self._header)

    def _complete(self, header: Header) -> Message:
        payload = self._payload
        self._header, self._payload, self._filled = None, bytearray(), 0
        version = header.arg0 if header.command is AdbCommand.CNXN else self.peer_version
        if version < VERSION_WITHOUT_CHECKSUMS and checksum(payload) != header.checksum:
            raise AdbProtocolError(f"wrong checksum of a {header.command.name} message")
        return Message(header.command, header.arg0, header.arg1, payload)
