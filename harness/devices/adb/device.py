"""A device behind an adb server."""

import contextlib
import posixpath
import re
import stat as stat_bits
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.clock import Deadline, DeadlineExceeded
from harness.devices import properties
from harness.devices.adb.client import TCP_SERIAL, AdbServer, device_features
from harness.devices.adb.connection import (
    FailReply,
    ServerUnreachable,
    Stalled,
    StreamClosed,
    open_service,
)
from harness.devices.adb.shell import ShellSession
from harness.devices.adb.sync import SyncSession
from harness.devices.base import DeviceProperties, Progress, PullItem, PushItem
from harness.devices.commands import Sink
from harness.devices.files import open_local, receiving, stat_local
from harness.devices.forward import Forward, SocketEnd
from harness.devices.shell_device import ShellDevice, forwarded_port
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
_LOG_TAIL = 4000


class Failures:
    """Turns the failures of one device's connections into errors of the harness."""

    def __init__(self, server: AdbServer, serial: str, shown: str) -> None:
        self._server = server
        self._serial = serial
        self._shown = shown
        self._seen = False

    @contextmanager
    def typed(
        self,
        action: str,
        timeout_s: float,
        log: Callable[[], str] | None = None,
        *,
        path: str | Callable[[], str] = "",
    ) -> Iterator[None]:
        """Raise what goes wrong inside as a `HarnessError`.

        `action` is what is done, `log` gives what it had written when it ended (and may fail
        with an `IndexError`), `path` is the file on the device that a refusal is about.
        """
        try:
            yield
            self._seen = True
        except ServerUnreachable as error:
            raise AdbServerError(self._server.shown, f"went away: {error}") from None
        except DeadlineExceeded:
            raise DeviceTimeoutError(self._shown, action, timeout_s, _tail(log)) from None
        except Stalled as error:
            action = f"waiting for progress of the {action}"
            raise DeviceTimeoutError(self._shown, action, error.seconds, _tail(log)) from None
        except StreamClosed as error:
            raise self._closed(action, str(error)) from None
        except FailReply as error:
            where = path if isinstance(path, str) else path()
            raise self._refused(action, where, str(error)[:_LOG_TAIL]) from None

    def _closed(self, action: str, reason: str) -> HarnessError:
        """Make the error of an ended connection, with the state that the adb server tells."""
        state = self._server.state(self._serial)
        if state == "unauthorized":
            return self._server.unauthorized(self._shown)
        now = f"; the adb server says now: {state}"
        return DeviceLostError(self._shown, action, reason + now)

    def _refused(self, action: str, path: str, reason: str) -> HarnessError:
        if reason.startswith("device unauthorized"):
            return self._server.unauthorized(self._shown)
        if _UNKNOWN.search(reason) and not self._seen:
            return NoDeviceError(self._shown)
        if _LOST.search(reason):
            return DeviceLostError(self._shown, action, reason)
        if _FULL.search(reason):
            return DeviceFullError(self._shown, path, None, None)
        return DeviceTransferError(self._shown, path or action, reason)


def _tail(log: Callable[[], str] | None) -> str:
    try:
        return log()[-_LOG_TAIL:] if log else ""
    except IndexError:  # it ended before there was a log
        return ""


_ASK_TIMEOUT_S = 10.0
_STALL_S = 60.0
"""Longest silence in a transfer of files."""


class AdbDevice(ShellDevice):
    """A device by its serial; implements `harness.devices.base.Device`.

    It holds no connection, so it may be used by several threads, and lives on when the device
    comes back.
    """

    def __init__(
        self,
        server: AdbServer,
        serial: str,
        *,
        shown: str | None = None,
        type: str = "android",  # noqa: A002 - the Protocol's word
    ) -> None:
        super().__init__(shown or serial)
        self._server = server
        self._serial = serial
        self._type = type
        self._features: frozenset[str] | None = None
        self._failures = Failures(server, serial, self.serial)

    def __repr__(self) -> str:
        return f"AdbDevice({self.serial!r} at {self._server.address})"

    @property
    def type(self) -> str:
        """`android`, or `virtual` if its maker says so."""
        return self._type

    @property
    def server(self) -> AdbServer:
        """The adb server it is reached through."""
        return self._server

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """Ask Android for the device's properties."""
        deadline = Deadline(timeout_s)
        props = properties.parse_getprop(self.shell("getprop", timeout_s=timeout_s).stdout)
        with self._typed("properties", timeout_s):
            left = deadline.remaining()
        script = f"printf '@@battery\\n'; dumpsys battery 2>/dev/null\n{properties.HARDWARE}"
        said = properties.parse(self.shell(script, timeout_s=left, check=False).stdout)
        with self._typed("properties", timeout_s):
            left = deadline.remaining()
        free = self.free_bytes(timeout_s=left)
        battery = properties.parse_battery(said.get("battery", ""))
        return properties.properties_from(self.serial, props, free, battery, said)

    def push(
        self,
        local: Path,
        remote: str,
        *,
        timeout_s: float = 600.0,
        mode: int | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file to the device; see `Device.push`."""
        if mode is None:
            mode = stat_bits.S_IMODE(stat_local(local).st_mode)
        deadline = Deadline(timeout_s)
        with self._typed(f"push of {local.name}", timeout_s, path=remote):
            v2 = "stat_v2" in self._all_features(deadline)
            with self._sync(deadline) as session:
                sent = _send(session, PushItem(local, remote, mode), on_progress, None)
                session.finish()
                found = session.stat(remote, v2=v2)
        expected = sent if v2 else sent & 0xFFFFFFFF
        # A link is followed by the push, but not by the stat.
        if found is None or (found.is_file and found.size != expected):
            size = "no file" if found is None else f"{found.size} bytes"
            raise DeviceTransferError(
                self.serial, remote, f"{size} arrived of the {sent} bytes sent"
            )
        return sent

    def push_many(
        self,
        items: Iterable[PushItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files in one go, with the present as their mtime; see `Device.push_many`."""
        batch = list(items)
        now = int(time.time())
        with self._sync_many("push", batch, timeout_s) as session:
            total = sum(_send(session, item, on_progress, now) for item in batch)
            session.finish()
        return total

    def pull(
        self,
        remote: str,
        local: Path,
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file from the device; see `Device.pull`."""
        deadline = Deadline(timeout_s)
        action = f"pull of {posixpath.basename(remote)}"
        with (
            receiving(local) as sink,
            self._typed(action, timeout_s, path=remote),
            self._sync(deadline) as session,
        ):
            return session.receive(remote, sink, on_progress)

    def pull_many(
        self,
        items: Iterable[PullItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files from the device in one go; see `Device.pull_many`."""
        batch = list(items)
        with self._sync_many("pull", batch, timeout_s) as session:
            sinks = (receiving(item.local, sync=False) for item in batch)
            return session.receive_many([item.remote for item in batch], sinks, on_progress)

    @contextmanager
    def forward(self, remote: str) -> Iterator[tuple[str, int]]:
        """Carry connections to it through the adb server; see `Device.forward`.

        The server itself forwards no port: it would go on after our process has ended, and for
        every user of its host.
        """
        service = f"tcp:{forwarded_port(remote)}"
        with self._typed(f"forward of {remote}", _ASK_TIMEOUT_S):
            device_features(self._server, self._serial, Deadline(_ASK_TIMEOUT_S))

        def connect(deadline: Deadline) -> SocketEnd:
            connection = open_service(self._server.address, self._serial, service, deadline)
            return SocketEnd(connection.detach())

        with Forward(connect, f"forward {self.serial}") as forward:
            yield forward.address

    def _find_root(self, timeout_s: float) -> str:
        """Return `$TMPDIR/qnnfarm` of its shell, or a folder below `/data/local/tmp`."""
        ask = 'printf %s "${TMPDIR:-/data/local/tmp}"'
        folder = self.shell(ask, timeout_s=timeout_s).stdout
        if not folder.startswith("/") or not folder.isprintable():
            raise DeviceTransferError(self.serial, folder, "$TMPDIR is no absolute path")
        return posixpath.join(folder, "qnnfarm")

    def _execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        self._require("shell_v2", deadline)
        service = f"shell,v2,raw:{script}"
        with open_service(self._server.address, self._serial, service, deadline) as connection:
            return ShellSession(connection, stdout, stderr).run(stdin)

    @contextmanager
    def _typed(
        self,
        action: str,
        timeout_s: float,
        log: Callable[[], str] | None = None,
        *,
        path: str | Callable[[], str] = "",
    ) -> Iterator[None]:
        with self._failures.typed(action, timeout_s, log, path=path):
            yield

    def _ask_to_reboot(self, timeout_s: float) -> None:
        deadline = Deadline(min(_ASK_TIMEOUT_S, timeout_s))
        with (
            self._typed("reboot", timeout_s),
            open_service(self._server.address, self._serial, "reboot:", deadline) as connection,
            contextlib.suppress(StreamClosed),
        ):
            connection.receive_some(1)
        self._features = None

    def _is_up(self, deadline: Deadline) -> bool:
        if TCP_SERIAL.fullmatch(self._serial) and self._server.state(self._serial) != "device":
            # Nobody but us connects again to a TCP device that its server gave up.
            with contextlib.suppress(DeviceConnectError):
                self._server.connect(self._serial, timeout_s=deadline.remaining())
        ask = ["getprop", "sys.boot_completed"]
        return self.shell(ask, timeout_s=deadline.remaining()).stdout.strip() == "1"

    @contextmanager
    def _sync(self, deadline: Deadline) -> Iterator[SyncSession]:
        try:
            with open_service(self._server.address, self._serial, "sync:", deadline) as connection:
                connection.stall_s = _STALL_S
                yield SyncSession(connection)
        except (DeadlineExceeded, Stalled):
            self.doubt()
            raise

    @contextmanager
    def _sync_many(
        self, action: str, items: Sequence[PushItem] | Sequence[PullItem], timeout_s: float
    ) -> Iterator[SyncSession]:
        """Open a sync session for several files; its errors name the first unanswered one."""
        opened: list[SyncSession] = []

        def unanswered() -> str:
            if not opened or not items:
                return ""
            return items[min(opened[0].answered, len(items) - 1)].remote

        with (
            self._typed(f"{action} of {len(items)} files", timeout_s, path=unanswered),
            self._sync(Deadline(timeout_s)) as session,
        ):
            opened.append(session)
            yield session

    def _all_features(self, deadline: Deadline) -> frozenset[str]:
        if self._features is None:
            self._features = device_features(self._server, self._serial, deadline)
        return self._features

    def _require(self, feature: str, deadline: Deadline) -> None:
        if feature not in self._all_features(deadline):
            self._features = None
            raise FailReply(f"the device lacks {feature}: Android 7 or later is needed")


def _send(
    session: SyncSession, item: PushItem, on_progress: Progress | None, mtime: int | None
) -> int:
    stat = stat_local(item.local)
    with open_local(item.local) as source:
        return session.send(
            source,
            item.remote,
            mode=item.mode,
            mtime=int(stat.st_mtime) if mtime is None else mtime,
            on_progress=on_progress,
        )
