"""A running device: boot, listen, reboot, power cut, shutdown."""

import asyncio
import contextlib
import errno
import logging
import platform
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from plugins.virtual_android.connection import DaemonConnection
from plugins.virtual_android.control import ControlHandler, open_control, serve_control
from plugins.virtual_android.events import EventLog
from plugins.virtual_android.filesystem import (
    NAMESPACE_ROOT,
    DeviceFilesystem,
    remove_partials,
)
from plugins.virtual_android.folder import DeviceRecord
from plugins.virtual_android.forwards import Forwards
from plugins.virtual_android.heat.simulation import HeatSimulation
from plugins.virtual_android.heat.throttler import Throttler
from plugins.virtual_android.injection import Effects, Injector
from plugins.virtual_android.outside import Outside
from plugins.virtual_android.power import PowerAction, PowerCommand, PowerPipe, PowerQueue
from plugins.virtual_android.processes import ProcessTable
from plugins.virtual_android.services import FEATURES, Services
from plugins.virtual_android.shell import ShellHost
from plugins.virtual_android.storage import Storage, truncate_unsynced
from plugins.virtual_android.sync import SyncHost
from plugins.virtual_android.userland import (
    Userland,
    banner,
    boot_properties,
    device_properties,
    set_property,
)

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_BIND_ATTEMPTS = 20
_ABIS = {"x86_64": "x86_64", "aarch64": "arm64-v8a"}
_MAX_UNAUTHENTICATED = 32
_OFF_S = 1.0
_FLUSH_S = 0.2


@dataclass(frozen=True, slots=True)
class DeviceSockets:
    """Sockets of the host's network and files, open before a device is confined.

    Attributes:
        listener: bound to the device's port, and listening while the device is on. While it is
            off, connections are refused, and no other program gets the port.
        control: listens for the commands of `DeviceControl`.
    """

    listener: socket.socket
    control: socket.socket

    @classmethod
    def open(cls, folder: Path, port: int | None) -> "DeviceSockets":
        """Open those of the device in `folder`, with the port of its last start if it is free."""
        if port:
            try:
                return cls(_bind(port), open_control(folder))
            except OSError as error:
                log.warning("port %d cannot be had again: %s", port, error)
        return cls(_bind_any(), open_control(folder))

    def close(self) -> None:
        """Close both."""
        self.listener.close()
        self.control.close()


class DeviceDaemon:
    """One virtual device in this process.

    Args:
        root: folder of the device's files, as this process sees it; in a namespace,
            `NAMESPACE_ROOT`.
        commands: scripts of its `/system/bin`, by name.
        outside: its files outside its root.
        sockets: the device's from now on.
    """

    def __init__(
        self,
        record: DeviceRecord,
        root: Path,
        *,
        commands: Mapping[str, str],
        outside: Outside,
        sockets: DeviceSockets,
        processes: ProcessTable,
    ) -> None:
        self._record = record
        self._root = root
        self._outside = outside
        self._sockets = sockets
        self._processes = processes
        self._filesystem = DeviceFilesystem(root, in_namespace=root == NAMESPACE_ROOT)
        self._userland = Userland(self._filesystem, record.name, commands)
        self._storage = Storage(
            root / "data", record.storage_bytes, on_full=lambda: self._faults.full("a push")
        )
        self._power = PowerQueue()
        self._connections: list[DaemonConnection] = []
        self._events = EventLog(outside.write_event, self._userland.log)
        throttler = Throttler(processes)
        effects = Effects(
            self._connections, processes, throttler, self._storage, self._userland, self._power
        )
        self._faults = Injector(effects, self._events)
        self._heat = HeatSimulation(self._filesystem.sys, processes, throttler)
        self._banner = ""
        self._services = Services(
            ShellHost(
                processes,
                self._userland.environment,
                self._storage.free_bytes,
                self._faults,
                self._heat.refresh,
            ),
            SyncHost(self._filesystem, self._storage, self._faults),
            Forwards(self._filesystem, self._faults),
            lambda: self._power.put(PowerCommand(PowerAction.REBOOT)),
        )

    def shut_down(self) -> None:
        """Shut the device down; called from its event loop."""
        self._power.put(PowerCommand(PowerAction.SHUTDOWN))

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Serve until `shut_down`, or until the device shuts itself down.

        Args:
            on_ready: called once with the port, when the device has booted for the first time.
        """
        handler = ControlHandler(self._faults, self._heat, self._power)
        control = await serve_control(self._sockets.control, handler.handle)
        pipe = PowerPipe(self._root / "requests", self._power)
        server: asyncio.Server | None = None
        try:
            remove_partials(self._root / "data")
            self._boot("cold")
            server = await self._listen()
            on_ready(self._port)
            while (reason := await self._serve(server)) is not None:
                self._boot(reason)
                server = await self._listen()
        except OSError as error:
            self._events.add("off", detail=f"failed: {error}")
            raise
        finally:
            log.info("shutting down")
            if server is not None:
                await self._go_down(server)
            control.close()
            self._sockets.close()
            pipe.close()
            self._heat.switch_off()

    async def _serve(self, server: asyncio.Server) -> str | None:
        """Serve, and stay off after a power command; gives the boot reason, `None` to shut down."""
        command = await self._power.next(PowerAction.REBOOT, PowerAction.CUT, PowerAction.SHUTDOWN)
        if command is None or command.action is PowerAction.SHUTDOWN:
            return None
        server.close()
        self._sockets.listener.shutdown(socket.SHUT_RDWR)
        _reuse_address(self._sockets.listener, on=False)  # or another with this option could bind
        return await self._stay_off(server, command)

    async def _stay_off(self, server: asyncio.Server, command: PowerCommand) -> str | None:
        """Go down, stay down and return the boot reason; `None` after a shutdown."""
        ends = (PowerAction.RESTORE, PowerAction.SHUTDOWN)
        if command.action is PowerAction.REBOOT:
            log.info("rebooting")
            await self._go_down(server)
            end = await self._power.next(*ends, PowerAction.CUT, within_s=_OFF_S)
            if end is None or end.action is not PowerAction.CUT:
                return _boot_reason("reboot", end)
            command = end  # the power is cut while the device is about to boot
        log.info("power cut")
        await self._go_down(server, flush_s=0)
        lost = await asyncio.to_thread(self._lose_files, command.unsynced_s)
        self._events.add("off", detail=f"lost {' '.join(lost)[:500]}" if lost else "")
        return _boot_reason("power", await self._power.next(*ends, within_s=command.off_s))

    def _lose_files(self, unsynced_s: float) -> list[str]:
        data = self._root / "data"
        lost = truncate_unsynced(data, self._root / "state", unsynced_s)
        remove_partials(data)
        return lost

    def _boot(self, reason: str) -> None:
        for name in ("data/local/tmp", "sdcard", "system"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        (self._root / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        self._userland.boot()
        self._userland.write_limit(self._storage.limit_bytes)
        properties = device_properties(
            name=self._record.name,
            soc=self._record.soc,
            serial_number=self._record.serial_number,
            abi=_ABIS.get(platform.machine(), platform.machine()),
        )
        self._banner = banner(properties, FEATURES)
        boot_properties(
            self._root / "properties",
            {
                **properties,
                "ro.boot.bootreason": reason,
                "ro.runtime.firstboot": str(time.time_ns() // 1_000_000),
            },
        )
        self._events.add("booted", detail=reason)

    async def _listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        set_property(self._root / "properties", "sys.boot_completed", "1")
        _reuse_address(self._sockets.listener, on=True)
        server = await loop.create_server(self._connect, sock=self._sockets.listener.dup())
        log.info("%s: listening on %s:%d", self._record.name, LOOPBACK, self._port)
        return server

    @property
    def _port(self) -> int:
        return int(self._sockets.listener.getsockname()[1])

    def _connect(self) -> DaemonConnection:
        unauthenticated = [c for c in self._connections if not c.online]
        if len(unauthenticated) >= _MAX_UNAUTHENTICATED:
            unauthenticated[0].abort()
        connection = DaemonConnection(
            self._banner, self._outside.accepted_keys, self._services.open, self._forget
        )
        if self._faults.stalled:
            connection.stall()
        self._connections.append(connection)
        return connection

    def _forget(self, connection: DaemonConnection) -> None:
        self._services.forwards.forget(connection)
        with contextlib.suppress(ValueError):
            self._connections.remove(connection)

    async def _go_down(self, server: asyncio.Server, *, flush_s: float = _FLUSH_S) -> None:
        """Close every connection, after `flush_s` to send queued messages; kill every process."""
        server.close()
        connections = list(self._connections)
        if connections and flush_s:
            for connection in connections:
                connection.close()
            await asyncio.sleep(flush_s)
        for connection in connections:
            connection.abort()
        self._faults.release()
        await self._processes.kill_all()
        for connection in connections:
            await connection.wait_for_services()
        await self._processes.kill_all()


def _boot_reason(reason: str, end: PowerCommand | None) -> str | None:
    return None if end is not None and end.action is PowerAction.SHUTDOWN else reason


def _bind_any() -> socket.socket:
    """Bind a free port, by its number: one that the kernel chose is lost when listening ends."""
    for _ in range(_BIND_ATTEMPTS):
        with _bind(0) as probe:
            port = int(probe.getsockname()[1])
        with contextlib.suppress(OSError):  # another program was faster
            return _bind(port)
    raise OSError(errno.EADDRINUSE, "no free port")


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _reuse_address(listener, on=True)
        listener.bind((LOOPBACK, port))
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    except OSError:
        listener.close()
        raise
    return listener


def _reuse_address(listener: socket.socket, *, on: bool) -> None:
    """Allow or forbid a bind while ended connections still occupy the port."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, on)
