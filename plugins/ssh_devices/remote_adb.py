"""Android devices at another host's adb server, through an SSH tunnel to it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from buildlib.closeable import Closeable
from harness.devices.adb.client import AdbDeviceInfo, AdbServer
from harness.devices.adb.connection import DEFAULT_PORT, ServerAddress
from harness.devices.adb.discovery import connect_tcp, open_device
from harness.devices.adb.server import resolve_server
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.errors import AdbServerError, NoDeviceError
from plugins.ssh_devices.host import SshHost
from plugins.ssh_devices.tunnel import Tunnel


class RemoteAdb(Closeable):
    """Another host's adb server, which is used as it is: never started, never stopped.

    It listens on that host's loopback, as adb servers do. A context manager that ends the tunnel;
    the host's connection stays its owner's.
    """

    def __init__(self, host: SshHost, name: str, port: int = DEFAULT_PORT) -> None:
        """`name` is the host's for people, `port` where it listens on the host."""
        self._host = host
        self._name = name
        self.port = port
        self._tunnel: Tunnel | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the tunnel."""
        with self._lock:
            tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel.close()

    def server(self) -> AdbServer:
        """Return the server, at this host's end of the tunnel.

        Raises:
            AdbServerError: it does not run there.
            HostError: the host cannot be reached.
        """
        self._host.connect()
        with self._lock:
            if self._tunnel is None:
                self._tunnel = Tunnel(self._host, self.port)
            tunnel = self._tunnel
        with _explained(tunnel):
            try:
                server = resolve_server(ServerAddress(*tunnel.address))
            except AdbServerError as error:
                reason = tunnel.refusal or error.reason
                hint = f"{reason}; `adb start-server` on {self._name} starts one"
                raise AdbServerError(self._shown, hint) from None
        return replace(server, name=self._shown)

    def devices(self) -> list[AdbDeviceInfo]:
        """Return all devices that it knows."""
        return self.server().devices()

    def open(self, serial: str) -> Device:
        """Return a device of it, which calls itself `serial@host`; see `open_device`."""
        server = self.server()
        connect_tcp(server, serial)
        try:
            open_device(serial, server=server)
        except NoDeviceError as error:
            raise NoDeviceError(error.wanted, error.present, self._name) from None
        tunnel = self._tunnel
        if tunnel is None:
            raise AdbServerError(self._shown, "its tunnel was closed meanwhile")
        return Device(_RemoteTransport(server, serial, f"{serial}@{self._name}", tunnel))

    @property
    def _shown(self) -> str:
        return f"{self._name}:{self.port} (through SSH)"


class _RemoteTransport(AdbTransport):
    """Way to a device through another host's adb server."""

    def __init__(self, server: AdbServer, serial: str, shown: str, tunnel: Tunnel) -> None:
        super().__init__(server, serial, shown=shown)
        self._tunnel = tunnel

    @contextmanager
    def typed(
        self,
        action: str,
        timeout_s: float,
        log: Callable[[], str] | None = None,
        *,
        path: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        """See `Transport.typed`."""
        with _explained(self._tunnel), super().typed(action, timeout_s, log, path=path):
            yield


@contextmanager
def _explained(tunnel: Tunnel) -> Iterator[None]:
    """Blame the adb server's host, or the way there, for errors of the server."""
    try:
        yield
    except AdbServerError as error:
        raise (tunnel.failure or error) from None
