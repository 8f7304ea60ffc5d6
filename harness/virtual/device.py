"""A running device: boots, listens, reboots, shuts down."""

import asyncio
import enum
import logging
import platform
import signal
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.virtual.auth import PublicKey, load_keys
from harness.virtual.connection import Connection
from harness.virtual.filesystem import DeviceFilesystem
from harness.virtual.namespace import show_boot_id
from harness.virtual.processes import ProcessTable
from harness.virtual.properties import PropertyStore, banner, device_properties
from harness.virtual.record import DeviceRecord
from harness.virtual.services import FEATURES, Services
from harness.virtual.shell import ShellHost
from harness.virtual.storage import Storage
from harness.virtual.sync.incoming import remove_partials
from harness.virtual.sync.service import SyncHost
from harness.virtual.userland import Userland

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_ABIS = {"x86_64": "x86_64", "aarch64": "arm64-v8a"}
_MAX_STRANGERS = 32
_OFF_S = 1.0
_FLUSH_S = 0.2
_REBIND_PATIENCE_S = 30.0
_THREADS = 16


class _Wish(enum.Enum):
    REBOOT = enum.auto()
    SHUTDOWN = enum.auto()


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
        daemon_pid: int,
        key_files: list[Path],
    ) -> None:
        self._record = record
        self._root = root
        self._daemon_pid = daemon_pid
        self._key_files = key_files
        self._filesystem = DeviceFilesystem(root, in_namespace)
        self._properties = PropertyStore(root / "properties")
        self._userland = Userland(self._filesystem, record.name, root / "properties")
        self._storage = Storage(root / "data", record.storage_bytes)
        self._processes = ProcessTable()
        self._wishes: asyncio.Queue[_Wish] = asyncio.Queue()
        self._connections: list[Connection] = []
        self._banner = ""
        self._services = Services(
            ShellHost(self._processes, self._userland.environment, self._storage.free_bytes),
            SyncHost(self._filesystem, self._storage),
            lambda: self._wishes.put_nowait(_Wish.REBOOT),
        )

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Serve until SIGTERM or SIGINT; SIGUSR1 reboots.

        Args:
            on_ready: called once with the port, when the device has booted for the first time.

        Raises:
            OSError: files cannot be written, or no port can be had.
        """
        self._install_handlers()
        remove_partials(self._root / "data")
        self._boot("cold")
        if self._filesystem.in_namespace:
            show_boot_id(self._root / "boot_id")
        server = await self._listen(_bind_preferred(self._record.port))
        port = self._port_of(server)
        on_ready(port)
        try:
            while await self._wishes.get() is _Wish.REBOOT:
                log.info("rebooting")
                await self._go_down(server)
                await asyncio.sleep(_OFF_S)
                while not self._wishes.empty():
                    if self._wishes.get_nowait() is _Wish.SHUTDOWN:
                        return
                self._boot("reboot")
                server = await self._listen(await _bind_again(port))
        finally:
            log.info("shutting down")
            await self._go_down(server)

    def _install_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="disk"))
        self._processes.install()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._wishes.put_nowait, _Wish.SHUTDOWN)
        loop.add_signal_handler(signal.SIGUSR1, self._wishes.put_nowait, _Wish.REBOOT)

    def _boot(self, reason: str) -> None:
        for name in ("data/local/tmp", "sdcard", "system"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        (self._root / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        self._userland.install(daemon_pid=self._daemon_pid, limit_bytes=self._record.storage_bytes)
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

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        self._properties.set("sys.boot_completed", "1")
        server = await loop.create_server(self._connect, sock=listener)
        log.info("listening on %s:%d", LOOPBACK, self._port_of(server))
        return server

    @staticmethod
    def _port_of(server: asyncio.Server) -> int:
        return int(server.sockets[0].getsockname()[1])

    def _connect(self) -> Connection:
        strangers = [one for one in self._connections if not one.online]
        if len(strangers) >= _MAX_STRANGERS:
            strangers[0].abort()
        connection = Connection(
            self._banner, self._keys, self._services.open, self._connections.remove
        )
        self._connections.append(connection)
        return connection

    def _keys(self) -> list[PublicKey]:
        keys, refused = load_keys(self._key_files)
        for line in refused:
            log.warning("key left out: %s", line)
        return keys

    async def _go_down(self, server: asyncio.Server) -> None:
        """Drop every connection and kill every process."""
        server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.sleep(_FLUSH_S)
        for connection in connections:
            connection.abort()
        await self._processes.kill_all()
        for connection in connections:
            await connection.finished()
        await self._processes.kill_all()


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    except OSError:
        listener.close()
        raise
    return listener


def _bind_preferred(port: int | None) -> socket.socket:
    """The port of last time if nobody else has taken it, else any."""
    if port:
        try:
            return _bind(port)
        except OSError as error:
            log.warning("port %d cannot be had again: %s", port, error)
    return _bind(0)


async def _bind_again(port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _REBIND_PATIENCE_S
    while True:
        try:
            return _bind(port)
        except OSError:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.1)
