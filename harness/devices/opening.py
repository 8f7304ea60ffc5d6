"""From what names a device to the device, with the connections to other hosts that this takes."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from harness.devices.adb.client import AdbServer
from harness.devices.adb.server import ensure_server
from harness.devices.base import Device
from harness.devices.discovery import connect_tcp, open_device
from harness.devices.spec import DeviceSpec
from harness.errors import DeviceSpecError

if TYPE_CHECKING:
    from harness.devices.remote import RemoteAdb
    from harness.devices.ssh.host import SshHost


class Devices:
    """Opens devices, and owns the connections to their hosts: one a host, shared by threads.

    What it opened is usable until it is closed. A context manager.
    """

    def __init__(
        self,
        *,
        server: AdbServer | None = None,
        ssh_config: Path | None = None,
        adb_ports: Mapping[str, int] | None = None,
    ) -> None:
        """Nothing is connected to yet.

        Args:
            server: this host's adb server; by default the environment's, started if need be.
            ssh_config: by default `~/.ssh/config`.
            adb_ports: where the adb servers of other hosts listen, by the host's name; by default
                what `SetEnv ANDROID_ADB_SERVER_PORT=...` in `ssh_config` says, else 5037.
        """
        self._server = server
        self._ssh_config = ssh_config
        self._adb_ports = dict(adb_ports or {})
        self._hosts: dict[object, SshHost] = {}
        self._remotes: dict[tuple[object, int], RemoteAdb] = {}
        self._owned = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections to other hosts."""
        with self._lock:
            self._hosts.clear()
            self._remotes.clear()
            owned = self._owned.pop_all()
        owned.close()

    def open(self, spec: DeviceSpec) -> Device:
        """The device that `spec` names, reached and found usable.

        Raises:
            DeviceSpecError: a virtual device's name, which only a pool knows.
            NoDeviceError: its adb server does not know it.
            DeviceUnauthorizedError, DeviceLostError, DeviceConnectError: it is not usable.
            AdbServerError: its adb server cannot be reached.
            HostError: its host cannot be reached, see `harness.devices.ssh`.
        """
        if spec.type == "local":
            from harness.devices.local import LocalDevice

            return LocalDevice()
        if spec.type == "linux":
            from harness.devices.linux import LinuxDevice

            host = self._host(spec.identifier)
            host.connect()
            return LinuxDevice(host)
        if spec.type == "virtual":
            how = "virtual devices are opened by a pool, or by their serials (`qnnfarm device ls`)"
            raise DeviceSpecError(str(spec), how)
        if spec.host is None:
            server = self._server or ensure_server()
            connect_tcp(server, spec.serial)
            return open_device(spec.serial, server=server)
        return self.adb_of(spec.host).open(spec.serial)

    def adb_of(self, name: str) -> "RemoteAdb":
        """The adb server of another host, through the connection to it; nothing is asked yet.

        Raises:
            HostError: the host's configuration cannot be used.
        """
        from harness.devices.remote import DEFAULT_PORT, RemoteAdb

        host = self._host(name)
        port = self._adb_ports.get(name) or host.config.adb_port or DEFAULT_PORT
        with self._lock:
            key = name, port
            if key not in self._remotes:
                self._remotes[key] = self._owned.enter_context(RemoteAdb(host, name, port))
            return self._remotes[key]

    def _host(self, name: str) -> "SshHost":
        from harness.devices.ssh.config import resolve_host
        from harness.devices.ssh.host import SshHost

        config = resolve_host(name, self._ssh_config)
        key = replace(config, asked="")
        with self._lock:
            if key not in self._hosts:
                self._hosts[key] = self._owned.enter_context(SshHost(config))
            return self._hosts[key]
