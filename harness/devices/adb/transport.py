"""Way to a device behind an adb server, and adb's shell protocol v2.

That has the output, errors, exit status and input of a command. AOSP
`packages/modules/adb/shell_protocol.h`: packets of a one-byte kind, a little-endian 32-bit length,
and that many bytes.
"""

import contextlib
import enum
import posixpath
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import BinaryIO

from harness.clock import Deadline, DeadlineExceeded
from harness.devices import properties
from harness.devices.adb.client import TCP_SERIAL, AdbServer, device_features
from harness.devices.adb.connection import (
    Connection,
    FailReply,
    ServerUnreachable,
    Stalled,
    StreamClosed,
    open_service,
)
from harness.devices.adb.sync import FileStat, SyncSession
from harness.devices.base import DeviceProperties, Progress, PushItem
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
                v2 = "stat_v2" in self._all_features(deadline)
                for item, size in zip(items, sizes, strict=True):
                    self._check(session.stat(item.remote, v2=v2), item.remote, size, v2=v2)
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

    def _check(self, stat: FileStat | None, remote: str, sent: int, *, v2: bool) -> None:
        """Compare the size of a file on the device with the one sent."""
        size = sent if v2 else sent & 0xFFFFFFFF
        # A link is followed by the push, but not by the stat.
        if stat is None or (stat.is_file and stat.size != size):
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

    def _all_features(self, deadline: Deadline) -> frozenset[str]:
        if self._features is None:
            self._features = device_features(self.server, self._serial, deadline)
        return self._features

    def _require(self, feature: str, deadline: Deadline) -> None:
        if feature not in self._all_features(deadline):
            self._features = None
            raise FailReply(f"the device lacks {feature}: Android 7 or later is needed")


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
