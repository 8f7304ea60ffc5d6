"""What a client asks a shell for, and the packets of `shell,v2`.

Sources: AOSP packages/modules/adb, SERVICES.TXT (`shell[,arg1,arg2,...]:[command]`) and
`shell_protocol.h`: one byte of kind, four of little-endian length, data.
"""

import enum
import re
import struct
from dataclasses import dataclass

from harness.errors import AdbProtocolError
from harness.virtual_device.stream import ExactReader

_PACKET = struct.Struct("<BI")
_MAX_PACKET = 1024 * 1024
_WINDOW = re.compile(rb"(\d{1,5})x(\d{1,5}),(\d{1,5})x(\d{1,5})\0?")
_TERM = re.compile(r"[A-Za-z0-9._+-]{1,64}")


class PacketKind(enum.IntEnum):
    """First byte of a packet."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    CLOSE_STDIN = 4
    WINDOW_SIZE = 5


@dataclass(frozen=True, slots=True)
class ShellRequest:
    """One command to run.

    Attributes:
        command: what `sh -c` gets; `None` for an interactive shell.
        packets: whether the stream carries `shell,v2` packets or raw bytes.
        terminal: whether the command runs on a pseudo-terminal.
    """

    command: bytes | None
    packets: bool
    terminal: bool
    term: str = "dumb"


def parse_shell_service(name: bytes) -> ShellRequest | None:
    """Read `shell:...`, `shell,v2,...:...` or `exec:...`; `None` for any other service."""
    head, colon, command = name.partition(b":")
    service, *options = head.decode("utf-8", "replace").split(",")
    if not colon or service not in {"shell", "exec"} or (service == "exec" and options):
        return None
    terminal = service == "shell" and not command
    term = "dumb"
    for option in options:
        if option in {"pty", "raw"}:
            terminal = option == "pty"
        elif option.startswith("TERM=") and _TERM.fullmatch(option[5:]):
            term = option[5:]
    return ShellRequest(command or None, "v2" in options, terminal, term)


def pack_packet(kind: PacketKind, data: bytes | bytearray) -> bytes:
    """One packet, ready to be sent."""
    return _PACKET.pack(kind, len(data)) + data


async def read_packet(reader: ExactReader) -> tuple[int, bytes]:
    """The next packet of a client: its kind, perhaps unknown, and its data.

    Raises:
        AdbProtocolError: larger than any client sends.
        StreamClosedError: the client is gone.
    """
    kind, length = _PACKET.unpack(await reader.exactly(_PACKET.size))
    if length > _MAX_PACKET:
        raise AdbProtocolError(f"shell packet of {length} bytes")
    return kind, await reader.exactly(length)


def parse_window_size(data: bytes) -> bytes | None:
    """A `struct winsize` from `ROWSxCOLUMNS,WIDTHxHEIGHT`; `None` where it is not that."""
    match = _WINDOW.fullmatch(data)
    if match is None:
        return None
    numbers = [int(number) for number in match.groups()]
    return struct.pack("@4H", *numbers) if max(numbers) <= 0xFFFF else None
