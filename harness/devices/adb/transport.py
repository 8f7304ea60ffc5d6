"""Way to a device behind an adb server, by adb's protocols for shells (v2) and files.

The shell protocol has the output, errors, exit status and input of a command. AOSP
`packages/modules/adb/shell_protocol.h`: packets of a one-byte kind, a little-endian 32-bit length,
and that many bytes.

Files go by the sync protocol (AOSP `packages/modules/adb/docs/dev/sync.md`). Those of one session
are sent, and asked for, one after the other without waiting for the answers in between, as many
small ones would cost a round trip each; a refusal is seen while a file is still being sent.
"""

import contextlib
import enum
import os
import posixpath
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from harness.clock import Deadline, DeadlineExceeded
from harness.devices import properties
from harness.devices.adb.client import TCP_SERIAL, AdbServer, device_features
from harness.devices.adb.connection import Connection, open_service
from harness.devices.base import (
    DeviceProperties,
    FailReply,
    Progress,
    PushItem,
    ServerUnreachable,
    Stalled,
    StreamClosed,
)
from harness.devices.commands import Sink
from harness.devices.device import Device
from harness.devices.files import open_local
from harness.devices.forward import Forward, SocketEnd
from harness.errors import (
    AdbServerError,
    DeviceConnectError,
    DeviceFullError,
    DeviceLostError,
    DeviceTimeoutError,
    DeviceTransferError,
    HarnessError,
    NoDeviceError,
)

_DATA_MAX = 64 * 1024
_STEP_BYTES = 16 * _DATA_MAX
_REQUEST = struct.Struct("<4sI")
_STAT = struct.Struct("<IQQIIIIQqqq")
_PATH_MAX = 1024
_ASKED_AHEAD = 64
"""Requests for files that wait for their answers; they fit into the buffers on the way."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Stat of a path on a device."""

    mode: int
    size: int

    @property
    def is_file(self) -> bool:
        """True if it is a regular file."""
        return stat.S_ISREG(self.mode)


class SyncSession:
    """An open `sync:` service; its methods raise `FailReply` where the device refuses.

    Attributes:
        answered: how many of the sent files the device has confirmed.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unanswered = 0
        self.answered = 0

    def send(
        self,
        source: BinaryIO,
        remote: str,
        *,
        mode: int,
        mtime: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Send a whole file; it is there for certain only once `finish` has returned.

        `on_progress` is called with the number of bytes sent since the call before.

        Returns:
            How many bytes it held at the beginning.

        Raises:
            FailReply: the device refused this file or one before, with its reason; `answered`
                tells which. Or the file became shorter meanwhile.
            StreamClosed, DeadlineExceeded: see `Connection`.
        """
        path = _encode(f"{remote},{stat.S_IFREG | mode}")
        head = _REQUEST.pack(b"SEND", len(path)) + path
        end = _REQUEST.pack(b"DONE", mtime & 0xFFFFFFFF)
        file = source.fileno()
        size = os.fstat(file).st_size
        if size <= _DATA_MAX:
            self._send_small(head, file, size, end)
            if on_progress and size:
                on_progress(size)
            return size
        self._or_refusal(lambda: self._connection.send(head))
        self._unanswered += 1
        if self._connection.has_input():
            self._read_answer()
        for start in range(0, size, _STEP_BYTES):
            step = min(_STEP_BYTES, size - start)
            self._or_refusal(partial(self._send_data, file, start, step))
            if self._connection.has_input():
                self._read_answer()
            if on_progress:
                on_progress(step)
        self._or_refusal(lambda: self._connection.send(end))
        return size

    def finish(self) -> None:
        """Wait until the device has confirmed all that was sent."""
        while self._unanswered:
            self._read_answer()

    def receive_many(
        self,
        remotes: Sequence[str],
        sinks: Iterable[AbstractContextManager[BinaryIO]],
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Write files of the device to `sinks`, in order; gives the sum of their sizes.

        `answered` counts the files that came whole.
        """
        total = 0
        self._connection.send(b"".join(map(_receive_request, remotes[:_ASKED_AHEAD])))
        for number, opening in enumerate(sinks):
            with opening as sink:
                total += self._receive_asked(sink, on_progress)
            self.answered += 1
            # One at a time: each carries the acknowledgement of what came, which the adb server
            # would otherwise await for up to 40 ms before it passes the next small file on.
            for remote in remotes[number + _ASKED_AHEAD : number + _ASKED_AHEAD + 1]:
                self._connection.send(_receive_request(remote))
        return total

    def _receive_asked(self, sink: BinaryIO, on_progress: Callable[[int], None] | None) -> int:
        total = 0
        while True:
            kind, length = self._header()
            if kind == b"DONE":
                return total
            self._expect(kind, b"DATA", length)
            while length:
                data = self._connection.receive_some(min(length, _DATA_MAX))
                sink.write(data)
                length -= len(data)
                total += len(data)
                if on_progress:
                    on_progress(len(data))

    def stat(self, remote: str) -> FileStat | None:
        """Return the stat of `remote`, links not followed; `None` if it does not exist."""
        path = _encode(remote)
        self._connection.send(_REQUEST.pack(b"LST2", len(path)) + path)
        answer = self._connection.receive(4)
        if answer != b"LST2":
            raise FailReply(f"the answer to LST2 was {answer!r}")
        fields = _STAT.unpack(self._connection.receive(_STAT.size))
        error, mode, size = fields[0], fields[3], fields[7]
        return None if error else FileStat(mode, size)

    def _send_small(self, head: bytes, file: int, size: int, done: bytes) -> None:
        """Send a file of one DATA packet, its head and its end in one piece."""
        data = os.pread(file, size, 0) if size else b""
        if len(data) < size:
            raise FailReply("the file became shorter while it was sent")
        body = _REQUEST.pack(b"DATA", size) + data if size else b""
        self._or_refusal(lambda: self._connection.send(head + body + done))
        self._unanswered += 1
        if self._connection.has_input():
            self._read_answer()

    def _send_data(self, file: int, start: int, count: int) -> None:
        """Send a part of an open file as DATA packets."""
        end = start + count
        for offset in range(start, end, _DATA_MAX):
            length = min(_DATA_MAX, end - offset)
            head = _REQUEST.pack(b"DATA", length)
            self._connection.send_file(head, file, offset, length)

    def _or_refusal(self, send: Callable[[], None]) -> None:
        """Send; where the device has closed, the refusal that it may have sent before counts."""
        try:
            send()
        except StreamClosed as closed:
            try:
                self.finish()
            except StreamClosed:
                raise closed from None
            raise

    def _read_answer(self) -> None:
        kind, length = self._header()
        self._expect(kind, b"OKAY", length)
        self._unanswered -= 1
        self.answered += 1

    def _header(self) -> tuple[bytes, int]:
        kind, length = _REQUEST.unpack(self._connection.receive(_REQUEST.size))
        return kind, length

    def _expect(self, kind: bytes, wanted: bytes, length: int) -> None:
        if kind == b"FAIL":
            raise FailReply(self._connection.receive(length).decode("utf-8", "replace"))
        if kind != wanted or length > _DATA_MAX:
            raise FailReply(f"instead of {wanted!r} the device sent {kind!r} with {length}")


def _receive_request(remote: str) -> bytes:
    path = _encode(remote)
    return _REQUEST.pack(b"RECV", len(path)) + path


def _encode(path: str) -> bytes:
    data = path.encode("utf-8", "surrogateescape")
    if len(data) > _PATH_MAX or b"\0" in data:
        raise FailReply(f"a path of {len(data)} bytes cannot be sent")
    return data


_LOST = re.compile(
    r"device '[^']{0,200}' not found|device not found|device offline"
    r"|device still (connecting|authorizing)|no devices/emulators found|^closed$"
    r"|device is (being|in)|connection reset|protocol fault",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"device '[^']{0,200}' not found")
_FULL = re.compile(r"no space left|disk quota exceeded|file too large", re.IGNORECASE)
_LONGEST_REFUSAL = 4000
_ASK_TIMEOUT_S = 10.0
_STALL_S = 60.0
"""Longest silence in a transfer of files."""
_PACKET_HEADER = struct.Struct("<BI")
_STDIN_PACKET = 16 * 1024
_READ_BYTES = 256 * 1024


class AdbTransport:
    """Way to an Android device through an adb server.

    It holds no connection, so it lives on when the device comes back.

    Attributes:
        server: the adb server.
    """

    def __init__(
        self,
        server: AdbServer,
        serial: str,
        *,
        shown: str | None = None,
        type: str = "android",  # noqa: A002 - as `Transport` calls it
    ) -> None:
        self.serial = shown or serial
        self.type = type
        self.server = server
        self._serial = serial
        self._features: frozenset[str] | None = None
        self._is_known = False

    def execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        """Run a script by adb's shell protocol; see `Transport.execute`."""
        self._require("shell_v2", deadline)
        service = f"shell,v2,raw:{script}"
        with open_service(self.server.address, self._serial, service, deadline) as connection:
            return ShellSession(connection, stdout, stderr).run(stdin)

    @contextmanager
    def lifeline(self) -> Iterator[Callable[[], bool]]:
        """Keep an idle command on the device; yields whether it was cut off, as all others were.

        For what else runs there: `adb shell` ends with 0 when the device goes away, before adb 35.
        """
        deadline = Deadline(_ASK_TIMEOUT_S)
        with ExitStack() as stack:
            with self.typed("shell", _ASK_TIMEOUT_S):
                self._require("shell_v2", deadline)
                service = "shell,v2,raw:read -r _"
                connection = open_service(self.server.address, self._serial, service, deadline)
                stack.enter_context(connection)
            yield connection.has_input

    @contextmanager
    def typed(
        self,
        action: str,
        timeout_s: float,
        log: Callable[[], str] | None = None,
        *,
        path: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        """See `Transport.typed`; `path` tells the file on the device that a refusal is about."""
        try:
            yield
            self._is_known = True
        except ServerUnreachable as error:
            raise AdbServerError(self.server.shown, f"went away: {error}") from None
        except (DeadlineExceeded, Stalled) as error:
            if isinstance(error, Stalled):
                action, timeout_s = f"waiting for progress of the {action}", error.seconds
            raise DeviceTimeoutError(self.serial, action, timeout_s, log() if log else "") from None
        except StreamClosed as error:
            raise self._closed(action, str(error)) from None
        except FailReply as error:
            where = path() if path else ""
            raise self._refused(action, where, str(error)[:_LONGEST_REFUSAL]) from None

    def send(
        self,
        action: str,
        items: Sequence[PushItem],
        *,
        mtime: int,
        check: bool,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Send files by the sync protocol; see `Transport.send`."""
        deadline = Deadline(timeout_s)
        sizes = []
        with self._sync(action, [item.remote for item in items], timeout_s, deadline) as session:
            for item in items:
                with open_local(item.local) as source:
                    size = session.send(
                        source, item.remote, mode=item.mode, mtime=mtime, on_progress=on_progress
                    )
                sizes.append(size)
            session.finish()
            if check:
                self._require("stat_v2", deadline)
                for item, size in zip(items, sizes, strict=True):
                    self._check(session.stat(item.remote), item.remote, size)
        return sum(sizes)

    def receive(
        self,
        action: str,
        remotes: Sequence[str],
        sinks: Iterable[AbstractContextManager[BinaryIO]],
        *,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Fetch files by the sync protocol; see `Transport.receive`."""
        with self._sync(action, remotes, timeout_s, Deadline(timeout_s)) as session:
            return session.receive_many(remotes, sinks, on_progress)

    def forward(self, port: int) -> Forward:
        """Carry connections through the adb server; see `Transport.forward`.

        The server itself forwards no port: it would go on after our process has ended, and for
        every user of its host.
        """
        with self.typed(f"forward of tcp:{port}", _ASK_TIMEOUT_S):
            device_features(self.server, self._serial, Deadline(_ASK_TIMEOUT_S))

        def connect(deadline: Deadline) -> SocketEnd:
            service = f"tcp:{port}"
            connection = open_service(self.server.address, self._serial, service, deadline)
            return SocketEnd(connection.detach())

        return Forward(connect, f"forward {self.serial}")

    def find_root(self, device: Device, timeout_s: float) -> str:
        """Return `$TMPDIR/qnnfarm` of its shell, or a folder below `/data/local/tmp`."""
        ask = 'printf %s "${TMPDIR:-/data/local/tmp}"'
        folder = device.shell(ask, timeout_s=timeout_s).stdout
        if not folder.startswith("/") or not folder.isprintable():
            raise DeviceTransferError(self.serial, folder, "$TMPDIR is no absolute path")
        return posixpath.join(folder, "qnnfarm")

    def properties(self, device: Device, timeout_s: float) -> DeviceProperties:
        """Ask Android; see `Transport.properties`."""
        deadline = Deadline.for_device(self.serial, "properties", timeout_s)
        props = properties.parse_getprop(device.shell("getprop", timeout_s=timeout_s).stdout)
        left_s = deadline.remaining()
        script = f"printf '@@battery\\n'; dumpsys battery 2>/dev/null\n{properties.HARDWARE}"
        facts = properties.parse(device.shell(script, timeout_s=left_s, check=False).stdout)
        free = device.free_bytes(timeout_s=deadline.remaining())
        battery = properties.parse_battery(facts.get("battery", ""))
        return properties.properties_from(self.serial, props, free, battery, facts)

    def reboot(self, device: Device, timeout_s: float) -> None:  # noqa: ARG002
        """Ask its adbd; see `Transport.reboot`."""
        deadline = Deadline(min(_ASK_TIMEOUT_S, timeout_s))
        with (
            self.typed("reboot", timeout_s),
            open_service(self.server.address, self._serial, "reboot:", deadline) as connection,
            contextlib.suppress(StreamClosed),
        ):
            connection.receive_some(1)
        self._features = None

    def is_up(self, device: Device, deadline: Deadline) -> bool:
        """Ask Android, to which the server is connected again if need be."""
        if TCP_SERIAL.fullmatch(self._serial) and self.server.state(self._serial) != "device":
            # Nobody but us connects again to a TCP device that its server gave up.
            with contextlib.suppress(DeviceConnectError):
                self.server.connect(self._serial, timeout_s=deadline.remaining())
        ask = ["getprop", "sys.boot_completed"]
        return device.shell(ask, timeout_s=deadline.remaining()).stdout.strip() == "1"

    @contextmanager
    def _sync(
        self, action: str, remotes: Sequence[str], timeout_s: float, deadline: Deadline
    ) -> Iterator[SyncSession]:
        """Open a sync session; a refusal is about the first file that is unanswered."""
        session: SyncSession | None = None

        def unanswered() -> str:
            count = session.answered if session else 0
            return remotes[min(count, len(remotes) - 1)] if remotes else ""

        with (
            self.typed(action, timeout_s, path=unanswered),
            open_service(self.server.address, self._serial, "sync:", deadline) as connection,
        ):
            connection.stall_s = _STALL_S
            session = SyncSession(connection)
            yield session

    def _check(self, stat: FileStat | None, remote: str, sent: int) -> None:
        """Compare the size of a file on the device with the one sent."""
        # A link is followed by the push, but not by the stat.
        if stat is None or (stat.is_file and stat.size != sent):
            arrival = "no file" if stat is None else f"{stat.size} bytes"
            reason = f"{arrival} arrived of the {sent} bytes sent"
            raise DeviceTransferError(self.serial, remote, reason)

    def _closed(self, action: str, reason: str) -> HarnessError:
        """Make the error of an ended connection, with the state that the adb server tells."""
        state = self.server.state(self._serial)
        if state == "unauthorized":
            return self.server.unauthorized(self.serial)
        now = f"; the adb server says now: {state}"
        return DeviceLostError(self.serial, action, reason + now)

    def _refused(self, action: str, path: str, reason: str) -> HarnessError:
        if reason.startswith("device unauthorized"):
            return self.server.unauthorized(self.serial)
        if _UNKNOWN.search(reason) and not self._is_known:
            return NoDeviceError(self.serial)
        if _LOST.search(reason):
            return DeviceLostError(self.serial, action, reason)
        if _FULL.search(reason):
            return DeviceFullError(self.serial, path, None, None)
        return DeviceTransferError(self.serial, path or action, reason)

    def _require(self, feature: str, deadline: Deadline) -> None:
        if self._features is None:
            self._features = device_features(self.server, self._serial, deadline)
        if feature not in self._features:
            self._features = None
            raise FailReply(f"the device lacks {feature}: Android 8 or later is needed")


class _Kind(enum.IntEnum):
    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    CLOSE_STDIN = 4


class ShellSession:
    """A running command on an open `shell,v2,raw:` service.

    `stdout` and `stderr` get the command's output as it comes.
    """

    def __init__(self, connection: Connection, stdout: Sink, stderr: Sink) -> None:
        self._connection = connection
        self._stdout = stdout
        self._stderr = stderr
        self._header = bytearray()
        self._kind = -1
        self._left = 0

    def run(self, stdin: bytes | None = None) -> int:
        """Feed `stdin`, hand on the output until the command ends; gives its exit status."""
        outgoing = memoryview(_input_packets(stdin or b""))
        while True:
            readable, writable = self._connection.wait(readable=True, writable=bool(outgoing))
            if readable:
                status = self._feed(self._connection.receive_some(_READ_BYTES))
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
                room = _PACKET_HEADER.size - len(self._header)
                self._header += view[:room]
                view = view[room:]
                if len(self._header) < _PACKET_HEADER.size:
                    return None
                self._kind, self._left = _PACKET_HEADER.unpack(self._header)
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
        packets += _PACKET_HEADER.pack(_Kind.STDIN, len(piece)) + piece
    packets += _PACKET_HEADER.pack(_Kind.CLOSE_STDIN, 0)
    return bytes(packets)
