"""A running device: boots, listens, reboots, loses power, shuts down."""

import asyncio
import contextlib
import logging
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.virtual.auth import PublicKey, load_keys
from harness.virtual.connection import Connection
from harness.virtual.control import open_control, serve_control
from harness.virtual.effects import DeviceEffects
from harness.virtual.filesystem import DeviceFilesystem
from harness.virtual.heat.heat import Heat
from harness.virtual.heat.throttling import Throttler
from harness.virtual.injection import Injector
from harness.virtual.journal import EventJournal, open_journal
from harness.virtual.listening import LOOPBACK, bind_again, bind_preferred, port_of
from harness.virtual.namespace import show_boot_id
from harness.virtual.power import SYNCED_NAME, lose_unsynced
from harness.virtual.processes import ProcessTable
from harness.virtual.properties import PropertyStore, banner, device_properties
from harness.virtual.record import DeviceRecord
from harness.virtual.services import FEATURES, Services
from harness.virtual.shell import ShellHost
from harness.virtual.storage import Storage
from harness.virtual.switchboard import Switchboard
from harness.virtual.sync.incoming import remove_partials
from harness.virtual.sync.service import SyncHost
from harness.virtual.userland import Userland
from harness.virtual.wishes import RequestPipe, Wish, Wishes, WishKind

log = logging.getLogger(__name__)

_ABIS = {"x86_64": "x86_64", "aarch64": "arm64-v8a"}
_MAX_STRANGERS = 32
_OFF_S = 1.0
_FLUSH_S = 0.2


@dataclass(frozen=True, slots=True)
class Handles:
    """What a device has open in its folder, which a namespace may hide. The device closes it."""

    control: socket.socket
    journal: int

    @classmethod
    def open(cls, folder: Path) -> "Handles":
        """Open them for the device in `folder`. Raises: OSError."""
        return cls(open_control(folder), open_journal(folder))


class Device:
    """One virtual device in this process.

    Args:
        root: folder of the device's files, as the process sees it.
        key_files: adb keys whose holders may connect; read at each authentication.
    """

    def __init__(
        self,
        record: DeviceRecord,
        root: Path,
        *,
        in_namespace: bool,
        key_files: list[Path],
        processes: ProcessTable,
        handles: Handles,
    ) -> None:
        self._record = record
        self._root = root
        self._key_files = key_files
        self._handles = handles
        self._processes = processes
        self._filesystem = DeviceFilesystem(root, in_namespace)
        self._properties = PropertyStore(root / "properties")
        self._userland = Userland(self._filesystem, record.name)
        self._storage = Storage(
            root / "data", record.storage_bytes, on_full=lambda: self._faults.full("a push")
        )
        self._wishes = Wishes()
        self._connections: list[Connection] = []
        self._journal = EventJournal(handles.journal)
        throttler = Throttler(processes)
        effects = DeviceEffects(
            self._connections, processes, throttler, self._storage, self._userland, self._wishes
        )
        self._faults = Injector(effects, self._journal)
        self._heat = Heat(self._filesystem.sys, processes, throttler)
        self._banner = ""
        self._services = Services(
            ShellHost(
                processes,
                self._userland.environment,
                self._storage.free_bytes,
                self._faults,
                self._heat.look,
            ),
            SyncHost(self._filesystem, self._storage, self._faults),
            lambda: self._wishes.add(Wish(WishKind.REBOOT)),
        )

    def shut_down(self) -> None:
        """Ask it to end, from its event loop."""
        self._wishes.add(Wish(WishKind.SHUTDOWN))

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Serve until `shut_down`, or until the device shuts itself down.

        Args:
            on_ready: called once with the port, when the device has booted for the first time.

        Raises:
            OSError: files cannot be written, or no port can be had.
        """
        switchboard = Switchboard(self._faults, self._heat, self._wishes)
        control = await serve_control(self._handles.control, switchboard.handle)
        requests = RequestPipe(self._root / "requests", self._wishes)
        server: asyncio.Server | None = None
        try:
            remove_partials(self._root / "data")
            self._boot("cold")
            if self._filesystem.in_namespace:
                show_boot_id(self._root / "boot_id")
            server = await self._listen(bind_preferred(self._record.port))
            port = port_of(server)
            on_ready(port)
            while (reason := await self._serve(server)) is not None:
                self._boot(reason)
                server = await self._listen(await bind_again(port))
        finally:
            log.info("shutting down")
            if server is not None:
                await self._go_down(server)
            control.close()
            requests.close()
            self._heat.switch_off()
            os.close(self._handles.journal)

    async def _serve(self, server: asyncio.Server) -> str | None:
        """Serve until the device is down; why it boots again, `None` if it does not."""
        while True:
            wish = await self._wishes.next()
            if wish is None or wish.kind is WishKind.POWER_ON:
                continue
            if wish.kind is WishKind.SHUTDOWN:
                return None
            if wish.kind is WishKind.REBOOT:
                log.info("rebooting")
                await self._go_down(server)
                return "reboot" if await self._stay_off(_OFF_S) else None
            log.info("power cut")
            await self._go_down(server, flush_s=0)
            synced = self._root / "state" / SYNCED_NAME
            data = self._root / "data"
            lost = await asyncio.to_thread(lose_unsynced, data, synced, wish.unsynced_s)
            await asyncio.to_thread(remove_partials, data)
            self._journal.add("off", detail=f"lost {' '.join(lost)[:500]}" if lost else "")
            return "power" if await self._stay_off(wish.off_s) else None

    async def _stay_off(self, seconds: float) -> bool:
        """Wait out the time, or for the power; whether the device is to boot then."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            wish = await self._wishes.next(max(0.0, until - loop.time()))
            if wish is None or wish.kind is WishKind.POWER_ON:
                return True
            if wish.kind is WishKind.SHUTDOWN:
                return False

    def _boot(self, reason: str) -> None:
        for name in ("data/local/tmp", "sdcard", "system"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        (self._root / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        self._userland.boot()
        self._userland.show_limit(self._storage.limit_bytes)
        properties = device_properties(
            name=self._record.name,
            soc=self._record.soc,
            serial_number=self._record.serial_number,
            abi=_ABIS.get(platform.machine(), platform.machine()),
        )
        self._banner = banner(properties, FEATURES)
        self._properties.boot(
            {
                **properties,
                "ro.boot.bootreason": reason,
                "ro.runtime.firstboot": str(time.time_ns() // 1_000_000),
            }
        )
        self._journal.add("booted", detail=reason)

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        self._properties.set("sys.boot_completed", "1")
        server = await loop.create_server(self._connect, sock=listener)
        log.info("%s: listening on %s:%d", self._record.name, LOOPBACK, port_of(server))
        return server

    def _connect(self) -> Connection:
        strangers = [one for one in self._connections if not one.online]
        if len(strangers) >= _MAX_STRANGERS:
            strangers[0].abort()
        connection = Connection(self._banner, self._keys, self._services.open, self._forget)
        if self._faults.stalled:
            connection.freeze()
        self._connections.append(connection)
        return connection

    def _forget(self, connection: Connection) -> None:
        with contextlib.suppress(ValueError):
            self._connections.remove(connection)

    def _keys(self) -> list[PublicKey]:
        keys, refused = load_keys(self._key_files)
        for line in refused:
            log.warning("key left out: %s", line)
        return keys

    async def _go_down(self, server: asyncio.Server, *, flush_s: float = _FLUSH_S) -> None:
        """Drop every connection, after what they have to say, and kill every process."""
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
            await connection.finished()
        await self._processes.kill_all()
