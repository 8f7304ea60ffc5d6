"""From a member of a pool to the device: finding it, reaching it, and what it says of itself."""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.devices.adb.client import AdbServer
from harness.devices.adb.device import AdbDevice
from harness.devices.adb.server import ensure_server
from harness.devices.base import Device
from harness.devices.opening import Devices
from harness.devices.spec import DeviceSpec
from harness.errors import (
    RecoveryStepError,
    UnknownVirtualDeviceError,
    VirtualDeviceChangeError,
    VirtualDeviceError,
)
from harness.pool.action_names import named
from harness.pool.config import DeviceEntry, HostConfig, PoolConfig
from harness.pool.members import Member
from harness.pool.records import Facts
from harness.virtual_device import manager

_SERIAL = re.compile(r"[A-Za-z0-9._:-]{4,64}")
_NO_SERIAL = {"unknown", "0123456789ABCDEF", "0123456789abcdef", "00000000", "12345678"}
_RESTART_S = 60.0


@dataclass(frozen=True, slots=True)
class Reached:
    """A device that answered.

    Attributes:
        key: by which the ledger knows it, whatever its address.
    """

    key: str
    device: Device
    facts: Facts


class Opener(Protocol):
    """Finds and reaches devices."""

    def discover(self, entry: DeviceEntry) -> Sequence[DeviceSpec]:
        """The devices that an entry of the configuration stands for now."""
        ...

    def open(self, member: Member) -> Device:
        """Reach a device; it need not answer yet.

        Raises:
            HarnessError: it cannot be reached.
        """
        ...

    def forget(self, member: Member) -> None:
        """Let go of what connects to a device, so that it is reached anew."""
        ...

    def restart_server(self, member: Member) -> None:
        """Restart the adb server of the host that a device is behind, if it is ours.

        Raises:
            HarnessError: it is not, or there is none.
        """
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...


class DeviceOpener:
    """Reaches every type of device; what was reached is kept until it is forgotten."""

    def __init__(self, config: PoolConfig, devices: Devices | None = None) -> None:
        """Nothing is connected to yet.

        Args:
            devices: with connections to use as well; closed with this.
        """
        self._config = config
        self._devices = devices or Devices(
            adb_ports={name: host.adb_port for name, host in config.hosts.items() if host.adb_port}
        )
        self._open: dict[str, Device] = {}
        self._lock = threading.Lock()

    def discover(self, entry: DeviceEntry) -> Sequence[DeviceSpec]:
        """See `Opener.discover`."""
        if entry.discover == "virtual":
            return [DeviceSpec("virtual", found.name) for found in manager.list_devices()]
        if entry.host is None:
            return [DeviceSpec("android", found.serial) for found in ensure_server().devices()]
        found_there = self._devices.adb_of(entry.host).devices()
        return [DeviceSpec("android", f"{found.serial}@{entry.host}") for found in found_there]

    def open(self, member: Member) -> Device:
        """See `Opener.open`."""
        known = self._open.get(member.name)
        if known is not None:
            return known
        if member.spec.type == "virtual":
            server = ensure_server()
            device: Device = AdbDevice(server, start_virtual(member, server), type="virtual")
        else:
            device = self._devices.open(member.spec)
        with self._lock:
            return self._open.setdefault(member.name, device)

    def forget(self, member: Member) -> None:
        """See `Opener.forget`."""
        with self._lock:
            self._open.pop(member.name, None)

    def restart_server(self, member: Member) -> None:
        """See `Opener.restart_server`."""
        name = member.spec.host if member.spec.type == "android" else None
        if name is None:
            raise RecoveryStepError("not taken: it hangs on no adb server")
        host = self._config.hosts.get(name, HostConfig())
        if not host.adb_server_ours:
            raise RecoveryStepError("not taken: the configuration does not say that it is ours")
        port = self._devices.adb_of(name).port
        behind = self._devices.open(DeviceSpec("linux", name))
        for action in ("kill-server", "start-server"):
            behind.shell(["adb", "-P", str(port), action], timeout_s=_RESTART_S)

    def close(self) -> None:
        """See `Opener.close`."""
        with self._lock:
            self._open.clear()
        self._devices.close()


def start_virtual(member: Member, server: AdbServer) -> str:
    """Start a virtual device if it does not run, connect it, and give its serial.

    Raises:
        HarnessError: there is none of that name, it has another SoC, or it does not start.
    """
    name = member.spec.identifier
    try:
        found = manager.get(name)
    except UnknownVirtualDeviceError:
        if member.soc is None:
            raise
        found = manager.start(name, member.soc)
    if member.soc is not None and found.soc != member.soc:
        raise VirtualDeviceChangeError(name, "SoC", found.soc, member.soc)
    if found.state != "running":
        found = manager.start(name, found.soc)
    if server.state(found.serial) != "device":
        server.connect(found.serial)
    return found.serial


def seen_from_outside(member: Member) -> str:
    """What keeps a virtual device from answering, without starting it; empty: nothing is known."""
    if member.spec.type != "virtual":
        return ""
    try:
        state = manager.get(member.spec.identifier).state
    except UnknownVirtualDeviceError:
        return "not there"
    except VirtualDeviceError:
        return "damaged"
    return "" if state == "running" else state


def soc_of_virtual(name: str) -> str | None:
    """The SoC of a virtual device that was made; `None` where there is none that can be read."""
    try:
        return manager.get(name).soc
    except VirtualDeviceError:
        return None


def survey(member: Member, device: Device, *, timeout_s: float) -> Reached:
    """Ask a device who it is."""
    with named("asking it who it is"):
        properties = device.properties(timeout_s=timeout_s)
    serial = properties.hardware_serial
    known = _SERIAL.fullmatch(serial) and serial not in _NO_SERIAL
    key = f"hardware:{serial}" if known else str(member.spec)
    facts = Facts(properties.soc, properties.hexagon or "", properties.free_bytes)
    return Reached(key, device, facts)
