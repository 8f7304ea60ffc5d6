"""Opening devices by their specs, with the connections to other hosts that this takes."""

import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.closeable import Closeable
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec, Hosts, device_types, find_type
from harness.errors import DeviceError, NoDeviceError, SeveralDevicesError, WrongUseError

if TYPE_CHECKING:
    from harness.devices.adb.client import AdbServer


class Devices(Closeable):
    """Opens devices, and owns the connections to their hosts: one a host, shared by threads.

    Its devices are usable until it is closed. A context manager.
    """

    def __init__(
        self,
        *,
        ssh_config: Path | None = None,
        adb_ports: Mapping[str, int] | None = None,
        trusted_users: Collection[str] = (),
    ) -> None:
        """Nothing is connected to yet.

        Args:
            ssh_config: by default `~/.ssh/config`.
            adb_ports: where the adb servers of other hosts listen, by the host's name; by default
                that of `SetEnv ANDROID_ADB_SERVER_PORT=...` in `ssh_config`, else 5037.
            trusted_users: other users with adb servers to use on this host, see `resolve_server`.
        """
        self._ssh_config = ssh_config
        self._adb_ports = dict(adb_ports or {})
        self._trusted_users = trusted_users
        self._open: dict[DeviceSpec, Device] = {}
        self._hosts: Hosts | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all connections to other hosts."""
        with self._lock:
            self._open.clear()
            hosts, self._hosts = self._hosts, None
        if hosts is not None:
            hosts.close()

    def open(self, spec: DeviceSpec, *, start: bool = False, soc: str | None = None) -> Device:
        """Open the device that `spec` names; until `forget`, the same object is returned.

        Args:
            start: start a virtual device that is stopped.
            soc: SoC that a virtual device must have; with `start`, a missing one is made.

        Raises:
            NoDeviceError: its adb server does not know it.
            DeviceUnauthorizedError, DeviceNotReadyError, DeviceConnectError: it is not usable.
            AdbServerError: its adb server cannot be reached.
            HostError: its host cannot be reached.
            VirtualDeviceError: there is no such virtual device, or it does not start.
        """
        device = self._open.get(spec)
        if device is None:
            new = device_types()[spec.type].open(self, spec, start=start, soc=soc)
            with self._lock:
                device = self._open.setdefault(spec, new)
        return device

    def forget(self, spec: DeviceSpec) -> None:
        """Reach a device again the next time that it is opened."""
        with self._lock:
            self._open.pop(spec, None)

    def resolve(self, spec: DeviceSpec | None) -> DeviceSpec:
        """Check that there is a device of that name, and return its spec.

        Args:
            spec: `None` for `$ANDROID_SERIAL`, else the only device of this host's adb server.

        Raises:
            NoDeviceError, SeveralDevicesError: there is none, or several could be meant.
            WrongUseError: it is the name of a device of another type.
            HarnessError: it is not usable; see `open`.
        """
        if spec is None:
            return self._only_one()
        try:
            device_types()[spec.type].check(self, spec)
        except NoDeviceError as error:
            for name, kind in device_types().items():
                if name != spec.type and any(
                    other.identifier == spec.identifier for other in kind.discover(self, None)
                ):
                    hint = f"{name}:{spec.identifier} names the {name} device of that name"
                    raise WrongUseError(f"{error}; {hint}") from error
            raise
        return spec

    def _only_one(self) -> DeviceSpec:
        from harness.devices.adb.discovery import open_device

        specs = self.connect_named()
        try:
            device = open_device(server=self.adb_server())
        except SeveralDevicesError as error:
            names = (str(specs.get(serial, serial)) for serial in error.serials)
            raise SeveralDevicesError(tuple(names)) from None
        if device.serial in specs:
            return specs[device.serial]
        spec = DeviceSpec("android", device.serial)
        self._open.setdefault(spec, device)
        return spec

    def connect_named(self) -> dict[str, DeviceSpec]:
        """Connect this host's adb server to the devices that run here under a name of their own.

        An adb server that was started anew knows none of the virtual devices that it had before.

        Returns:
            Their names by their serials at the adb server.
        """
        specs: dict[str, DeviceSpec] = {}
        for name, kind in device_types().items():
            for spec in kind.discover(self, None) if name != "android" else ():
                preview = kind.preview(spec)
                if preview.adb_serial and not preview.obstacle:
                    specs[preview.adb_serial] = spec
        entries = self.adb_server().devices() if specs else []
        usable = {entry.serial for entry in entries if entry.usable}
        for serial, spec in specs.items():
            if serial not in usable:
                with suppress(DeviceError):  # who asks for it is told
                    self.open(spec)
        return specs

    def adb_server(self) -> "AdbServer":
        """Return this host's adb server, started if need be."""
        from harness.devices.adb.server import ensure_server

        return ensure_server(trusted_users=self._trusted_users)

    def hosts(self) -> Hosts:
        """Return the connections to other hosts; nothing is asked of them yet.

        Raises:
            WrongUseError: no installed package has any.
        """
        with self._lock:
            if self._hosts is None:
                self._hosts = find_type("linux").hosts(self._ssh_config, self._adb_ports)
            return self._hosts
