"""A device behind an adb server."""

import os
import posixpath
import shlex
import stat as stat_bits
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from harness.adb.client import AdbServer, device_features
from harness.adb.connection import Deadline, FailReply, open_service
from harness.adb.shell import ShellSession, command_line
from harness.adb.sync import SyncSession
from harness.devices import properties
from harness.devices.adb_failures import Failures
from harness.devices.base import CommandResult, DeviceProperties, Progress, PushItem
from harness.errors import (
    DeviceCommandError,
    DevicePathError,
    DeviceTransferError,
    HostFileError,
)
from harness.files import replacing

_LOG_TAIL = 4000


class AdbDevice:
    """A device by its serial; implements `harness.devices.base.Device`.

    It holds no connection, so it may be used by several threads, and lives on when the device
    comes back.
    """

    def __init__(self, server: AdbServer, serial: str) -> None:
        self._server = server
        self._serial = serial
        self._work_root: str | None = None
        self._features: frozenset[str] | None = None
        self._failures = Failures(server, serial)

    def __repr__(self) -> str:
        return f"AdbDevice({self._serial!r} at {self._server.address})"

    @property
    def serial(self) -> str:
        """The name under which the adb server knows it."""
        return self._serial

    @property
    def server(self) -> AdbServer:
        """The adb server it is reached through."""
        return self._server

    @property
    def work_root(self) -> str:
        """`$TMPDIR/qnnfarm` of its shell, or below `/data/local/tmp`; asked once."""
        if self._work_root is None:
            ask = 'printf %s "${TMPDIR:-/data/local/tmp}"'
            folder = self.shell(ask).stdout
            if not folder.startswith("/") or not folder.isprintable():
                raise DevicePathError(self._serial, folder, "$TMPDIR is no absolute path")
            self._work_root = posixpath.join(folder, "qnnfarm")
        return self._work_root

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """What Android says of the device now."""
        deadline = Deadline(timeout_s)
        props = properties.parse_getprop(self.shell("getprop", timeout_s=timeout_s).stdout)
        with self._failures.typed("properties", timeout_s):
            left = deadline.remaining()
        battery = self.shell("dumpsys battery 2>/dev/null", timeout_s=left, check=False).stdout
        with self._failures.typed("properties", timeout_s):
            left = deadline.remaining()
        free = self.free_bytes(timeout_s=left)
        return properties.properties_from(
            self._serial, props, free, properties.parse_battery(battery)
        )

    def free_bytes(self, *, timeout_s: float = 30.0) -> int | None:
        """What may still be written where the work root is, or will be."""
        root = shlex.quote(self.work_root)
        parent = shlex.quote(posixpath.dirname(self.work_root))
        script = f"if [ -d {root} ]; then df -kP {root}; else df -kP {parent}; fi"
        return properties.parse_df(self.shell(script, timeout_s=timeout_s, check=False).stdout)

    def shell(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        stdin: bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        max_output: int = 4 << 20,
    ) -> CommandResult:
        """Run a script (text) or one command (words); see `Device.shell`."""
        line = command_line(command, env)
        shown = command_line(command)
        deadline = Deadline(timeout_s)
        log: list[ShellSession] = []
        with self._failures.typed(
            f"`{shown}`", timeout_s, lambda: log[0].stderr.text() + log[0].stdout.text()
        ):
            self._require("shell_v2", deadline)
            service = f"shell,v2,raw:{line}"
            with open_service(self._server.address, self._serial, service, deadline) as connection:
                log.append(session := ShellSession(connection, max_output=max_output))
                status = session.run(stdin)
        result = CommandResult(status, session.stdout.text(), session.stderr.text())
        if check and status:
            tail = (result.stderr if result.stderr.strip() else result.stdout)[-_LOG_TAIL:]
            raise DeviceCommandError(self._serial, shown, status, tail)
        return result

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
            mode = stat_bits.S_IMODE(_stat_local(local).st_mode)
        deadline = Deadline(timeout_s)
        with self._failures.typed(f"push of {local.name}", timeout_s, path=remote):
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
                self._serial, remote, f"{size} arrived of the {sent} bytes sent"
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
        deadline = Deadline(timeout_s)
        opened: list[SyncSession] = []

        def refused() -> str:
            return batch[min(opened[0].answered, len(batch) - 1)].remote if opened else ""

        total = 0
        now = int(time.time())
        with (
            self._failures.typed(f"push of {len(batch)} files", timeout_s, path=refused),
            self._sync(deadline) as session,
        ):
            opened.append(session)
            for item in batch:
                total += _send(session, item, on_progress, now)
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
        try:
            with (
                replacing(local) as sink,
                self._failures.typed(action, timeout_s, path=remote),
                self._sync(deadline) as session,
            ):
                return session.receive(remote, sink, on_progress)
        except OSError as error:
            raise HostFileError(str(local), error.strerror or str(error)) from None

    @contextmanager
    def _sync(self, deadline: Deadline) -> Iterator[SyncSession]:
        with open_service(self._server.address, self._serial, "sync:", deadline) as connection:
            yield SyncSession(connection)

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
    stat = _stat_local(item.local)
    with _open_local(item.local) as source:
        return session.send(
            source,
            item.remote,
            mode=item.mode,
            mtime=int(stat.st_mtime) if mtime is None else mtime,
            on_progress=on_progress,
        )


def _stat_local(path: Path) -> os.stat_result:
    try:
        stat = path.stat()
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from None
    if not stat_bits.S_ISREG(stat.st_mode):
        raise HostFileError(str(path), "it is no regular file")
    return stat


def _open_local(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from None
