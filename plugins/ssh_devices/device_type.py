"""Linux machines over SSH as a type of device, and the adb servers behind them."""

import re
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.devices.adb.connection import DEFAULT_PORT
from harness.devices.device import Device
from harness.devices.spec import HOST, DeviceSpec, DeviceType, Hosts

if TYPE_CHECKING:  # paramiko is loaded when a host is connected to
    from harness.devices.devices import Devices
    from plugins.ssh_devices.host import SshHost
    from plugins.ssh_devices.remote_adb import RemoteAdb


class LinuxType(DeviceType):
    """Linux machines over SSH."""

    identifier = re.compile(HOST)
    identifier_form = "HOST or USER@HOST"

    def open(
        self,
        devices: "Devices",
        spec: DeviceSpec,
        *,
        start: bool,  # noqa: ARG002
        soc: str | None,  # noqa: ARG002
    ) -> Device:
        """Connect to the host."""
        return devices.hosts().open(spec.identifier)

    def hosts(self, config: Path | None, adb_ports: Mapping[str, int]) -> Hosts:
        """Return connections to hosts as OpenSSH's configuration names them."""
        return SshHosts(config, adb_ports)


class SshHosts:
    """Implements `Hosts`; a host of two names has one connection."""

    def __init__(self, config: Path | None, adb_ports: Mapping[str, int]) -> None:
        self._config = config
        self._adb_ports = adb_ports
        self._hosts: dict[object, SshHost] = {}
        self._remotes: dict[tuple[str, int], RemoteAdb] = {}
        self._owned = ExitStack()
        self._lock = threading.Lock()

    def open(self, name: str) -> Device:
        """See `Hosts`."""
        from plugins.ssh_devices.transport import SshTransport

        host = self._host(name)
        host.connect()
        return Device(SshTransport(host))

    def adb(self, name: str) -> "RemoteAdb":
        """See `Hosts`; by default the port is that of `SetEnv ANDROID_ADB_SERVER_PORT=...`."""
        from plugins.ssh_devices.remote_adb import RemoteAdb

        host = self._host(name)
        port = self._adb_ports.get(name) or host.config.adb_port or DEFAULT_PORT
        with self._lock:
            if (name, port) not in self._remotes:
                remote = self._owned.enter_context(RemoteAdb(host, name, port))
                self._remotes[name, port] = remote
            return self._remotes[name, port]

    def close(self) -> None:
        """See `Hosts`."""
        with self._lock:
            self._owned.close()

    def _host(self, name: str) -> "SshHost":
        from plugins.ssh_devices.host import SshHost

        host = SshHost.named(name, self._config)
        key = replace(host.config, asked="")
        with self._lock:
            if key not in self._hosts:
                self._hosts[key] = self._owned.enter_context(host)
            return self._hosts[key]


LINUX = LinuxType()
