"""A running device: boots, listens, reboots, loses power, shuts down."""

import asyncio
import contextlib
import logging
import platform
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from harness.virtual_device.auth import load_keys
from harness.virtual_device.connection import Connection
from harness.virtual_device.control import Switchboard, serve_control
from harness.virtual_device.events import EventJournal
from harness.virtual_device.filesystem import DeviceFilesystem, remove_partials
from harness.virtual_device.folder import DeviceRecord, Handles
from harness.virtual_device.heat.simulation import Heat
from harness.virtual_device.heat.throttler import Throttler
from harness.virtual_device.injection import DeviceEffects, Injector
from harness.virtual_device.namespace import show_boot_id
from harness.virtual_device.power import RequestPipe, Wish, Wishes, WishKind
from harness.virtual_device.processes import ProcessTable
from harness.virtual_device.services import FEATURES, Services
from harness.virtual_device.shell import ShellHost
from harness.virtual_device.storage import Storage, lose_unsynced
from harness.virtual_device.sync import SyncHost
from harness.virtual_device.userland import PropertyStore, Userland, banner, device_properties

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_REBIND_PATIENCE_S = 30.0
_REBIND_EVERY_S = 0.002


def bind_preferred(port: int | None) -> socket.socket:
    """The port of last time if nobody else has taken it, else any. Raises: OSError."""
    if port:
        try:
            return _bind(port)
        except OSError as error:
            log.warning("port %d cannot be had again: %s", port, error)
    return _bind(0)


async def hold(port: int) -> socket.socket:
    """Keep the port of a listener just closed; connections to it are refused. Raises: OSError.

    Otherwise the kernel hands it out while the device is off, and nobody finds the device again.
    A process that was started just now may keep the listener open until its exec(2) is through.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _REBIND_PATIENCE_S
    while True:
        try:
            held = _bind(port)
        except OSError:
            if loop.time() > deadline:
                raise
        else:
            _share(held, on=False)  # or whoever sets it too gets the port as long as none listens
            return held
        await asyncio.sleep(_REBIND_EVERY_S)


def usable(listener: socket.socket) -> socket.socket:
    """A port as it must be to listen on it, held or new."""
    _share(listener, on=True)
    return listener


def port_of(server: asyncio.Server) -> int:
    """Where it listens."""
    return int(server.sockets[0].getsockname()[1])


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _share(listener, on=True)
        listener.bind((LOOPBACK, port))
        listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
    except OSError:
        listener.close()
        raise
    return listener


def _share(one: socket.socket, *, on: bool) -> None:
    """Whether connections that have ended leave the port usable."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, on)


_ABIS = {"x86_64": "x86_64", "aarch64": "arm64-v8a"}
_MAX_STRANGERS = 32
_OFF_S = 1.0
_FLUSH_S = 0.2


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
        self._journal = EventJournal(handles.folder)
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
            on_ready(port_of(server))
            while (back := await self._serve(server)) is not None:
                reason, listener = back
                with contextlib.ExitStack() as on_failure:
                    on_failure.callback(listener.close)
                    self._boot(reason)
                    server = await self._listen(listener)
                    on_failure.pop_all()
        except OSError as error:
            self._journal.add("off", detail=f"failed: {error}")
            raise
        finally:
            log.info("shutting down")
            if server is not None:
                await self._go_down(server)
            control.close()
            requests.close()
            self._heat.switch_off()
            self._journal.close()
            self._handles.close()

    async def _serve(self, server: asyncio.Server) -> tuple[str, socket.socket] | None:
        """Serve until the device is down, and stay down; `None` if it does not boot again.

        Gives why it boots, and the port that was kept for it.
        """
        while (wish := await self._wishes.next()) is None or wish.kind is WishKind.POWER_ON:
            pass
        if wish.kind is WishKind.SHUTDOWN:
            return None
        port = port_of(server)
        server.close()
        holding = asyncio.create_task(hold(port))
        try:
            reason = await self._be_off(server, wish)
        except OSError:
            holding.cancel()
            raise
        listener = await holding
        if reason is None:
            listener.close()
            return None
        return reason, listener

    async def _be_off(self, server: asyncio.Server, wish: Wish) -> str | None:
        """Go down as wished and wait; why the device boots then, `None` if it does not."""
        if wish.kind is WishKind.REBOOT:
            log.info("rebooting")
            await self._go_down(server)
            ended = await self._stay_off(_OFF_S, WishKind.POWER_CUT)
            if ended is None or ended.kind is not WishKind.POWER_CUT:
                return self._reason("reboot", ended)
            wish = ended  # the power goes while it is about to boot
        log.info("power cut")
        await self._go_down(server, flush_s=0)
        lost = await asyncio.to_thread(self._lose_files, wish.unsynced_s)
        self._journal.add("off", detail=f"lost {' '.join(lost)[:500]}" if lost else "")
        return self._reason("power", await self._stay_off(wish.off_s))

    def _lose_files(self, unsynced_s: float) -> list[str]:
        data = self._root / "data"
        lost = lose_unsynced(data, self._root / "state", unsynced_s)
        remove_partials(data)
        return lost

    @staticmethod
    def _reason(reason: str, ended: Wish | None) -> str | None:
        return None if ended is not None and ended.kind is WishKind.SHUTDOWN else reason

    async def _stay_off(self, seconds: float, *kinds: WishKind) -> Wish | None:
        """Wait out the time; the wish that ends it before: for power, for the end, of `kinds`."""
        ends = {WishKind.POWER_ON, WishKind.SHUTDOWN, *kinds}
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            wish = await self._wishes.next(max(0.0, until - loop.time()))
            if wish is None or wish.kind in ends:
                return wish

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
        server = await loop.create_server(self._connect, sock=usable(listener))
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

    def _keys(self) -> list[RSAPublicKey]:
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
