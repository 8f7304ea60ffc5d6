"""Opener that discovers and opens the devices of a pool, and asks them who they are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.devices.base import Device
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec
from harness.devices.types import device_types
from harness.errors import RecoveryStepError
from harness.pool.action_names import action_named
from harness.pool.config import DeviceEntry, HostConfig, PoolConfig
from harness.pool.members import Member
from harness.pool.records import Facts

_SERIAL = re.compile(r"[A-Za-z0-9._:-]{4,64}")
_PLACEHOLDER_SERIALS = {"unknown", "0123456789ABCDEF", "0123456789abcdef", "00000000", "12345678"}
_RESTART_S = 60.0


@dataclass(frozen=True, slots=True)
class ReachedDevice:
    """A device that answered.

    Attributes:
        key: its key in the ledger, whatever its address.
    """

    key: str
    device: Device
    facts: Facts


class Opener(Protocol):
    """Discovers and opens devices."""

    def discover(self, entry: DeviceEntry) -> Sequence[DeviceSpec]:
        """Return the devices that an entry of the configuration stands for now."""
        ...

    def open(self, member: Member) -> Device:
        """Open a device; it need not answer yet.

        Raises:
            HarnessError: it cannot be opened.
        """
        ...

    def forget(self, member: Member) -> None:
        """Forget the connection to a device, so that it is opened again."""
        ...

    def restart_server(self, member: Member) -> None:
        """Restart the adb server of a device's host, if it is ours.

        Raises:
            HarnessError: it is not ours, or there is none.
        """
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class DeviceOpener:
    """Opens devices of every type, with the hosts of a configuration."""

    def __init__(self, config: PoolConfig, devices: Devices | None = None) -> None:
        """Create an opener without connections.

        Args:
            devices: connections to use as well; closed with this.
        """
        self._config = config
        self._devices = devices or Devices(
            adb_ports={name: host.adb_port for name, host in config.hosts.items() if host.adb_port}
        )

    def discover(self, entry: DeviceEntry) -> Sequence[DeviceSpec]:
        """See `Opener.discover`."""
        name = "android" if entry.discover == "adb" else str(entry.discover)
        return device_types()[name].discover(self._devices, entry.host)

    def open(self, member: Member) -> Device:
        """See `Opener.open`."""
        return self._devices.open(member.spec, start=True, soc=member.soc)

    def forget(self, member: Member) -> None:
        """See `Opener.forget`."""
        self._devices.forget(member.spec)

    def restart_server(self, member: Member) -> None:
        """See `Opener.restart_server`."""
        name = member.spec.host if member.spec.type == "android" else None
        if name is None:
            raise RecoveryStepError("not taken: it hangs on no adb server")
        host = self._config.hosts.get(name, HostConfig())
        if not host.adb_server_ours:
            raise RecoveryStepError("not taken: the configuration does not say that it is ours")
        port = self._devices.adb_of(name).port
        shell_host = self._devices.open(DeviceSpec("linux", name))
        for action in ("kill-server", "start-server"):
            shell_host.shell(["adb", "-P", str(port), action], timeout_s=_RESTART_S)

    def close(self) -> None:
        """See `Opener.close`."""
        self._devices.close()


def identify(member: Member, device: Device, *, timeout_s: float) -> ReachedDevice:
    """Ask a device who it is, and what its facts are."""
    with action_named("asking it who it is"):
        properties = device.properties(timeout_s=timeout_s)
    serial = properties.hardware_serial
    unique = _SERIAL.fullmatch(serial) and serial not in _PLACEHOLDER_SERIALS
    key = f"hardware:{serial}" if unique else str(member.spec)
    facts = Facts(properties.soc, properties.hexagon or "", properties.free_bytes)
    return ReachedDevice(key, device, facts)
