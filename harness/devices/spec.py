"""Names of devices, before anything has reached them, and the registry of their types.

A type says how its devices are named, found and opened. Types of other packages are found through
the entry-point group `qnnfarm.device_types`: the entry's name is the type's, its object a
`DeviceType`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from buildlib.entry_points import entry_names, load_entry
from harness.devices.device import Device
from harness.errors import DeviceUnsupportedError, WrongUseError

if TYPE_CHECKING:  # `Devices` opens specs through their types
    from harness.devices.adb.client import AdbDeviceInfo, AdbServer
    from harness.devices.devices import Devices

DOOR = "device_types"
State = Literal["ok", "note", "broken"]
_LINUX = "linux"
"""The type whose devices are hosts over SSH, with adb servers of their own."""
_PLUGINS = MappingProxyType({_LINUX: "ssh_devices", "virtual": "virtual_android"})
HOST = r"(?:[A-Za-z0-9_.-]{1,64}@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]%-]{0,254}"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its type and identifier, in the vendor's form.

    Attributes:
        identifier: `android`: `SERIAL`, or `SERIAL@HOST` for one at another host's adb server;
            `linux`: `HOST` or `USER@HOST` as `~/.ssh/config` knows it; `virtual`: its name;
            `local`: empty, this machine.

    Raises:
        WrongUseError: no device can have that type or identifier.
    """

    type: str
    identifier: str = ""

    def __post_init__(self) -> None:
        kind = device_types().get(self.type)
        if kind is None:
            reason = _missing(self.type)
        elif not kind.identifier.fullmatch(self.identifier):
            reason = f"its identifier is {kind.identifier_form}"
        elif self.host and _LINUX not in device_types():
            reason = _missing(_LINUX)
        else:
            return
        raise WrongUseError(f"{str(self)!r} names no device: {reason}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `TYPE:IDENTIFIER`, `local`, or a bare identifier of an Android device."""
        kind, colon, rest = text.partition(":")
        if text == "local":
            return cls("local")
        if colon and (kind in device_types() or kind in _PLUGINS):
            return cls(kind, rest)
        return cls("android", text)

    @property
    def serial(self) -> str:
        """Of an Android device: the name under which its adb server knows it."""
        return self.identifier.partition("@")[0]

    @property
    def host(self) -> str | None:
        """The host that it is behind, or that it is; `None` for this one."""
        if self.type == _LINUX:
            return self.identifier
        return self.identifier.partition("@")[2] or None if self.type == "android" else None

    def __str__(self) -> str:
        return f"{self.type}:{self.identifier}" if self.identifier else self.type


@dataclass(frozen=True, slots=True)
class Preview:
    """Facts that a type knows of a device without reaching it.

    Attributes:
        exists: `None` where only reaching the device tells.
        obstacle: why it cannot answer now, e.g. `stopped`; empty if no reason is known.
        soc: its SoC, if that is known.
        adb_serial: its serial at this host's adb server: empty while it has none, `None` for a
            device that is not reached through that server.
        remark: what its users should know; empty if nothing is unusual.
    """

    exists: bool | None = None
    obstacle: str = ""
    soc: str | None = None
    adb_serial: str | None = None
    remark: str = ""


class HostAdb(Protocol):
    """The adb server of another host, at a port of its loopback; never started, never stopped."""

    port: int

    def devices(self) -> "Sequence[AdbDeviceInfo]":
        """Return all devices that it knows."""

    def open(self, serial: str) -> Device:
        """Return a device of it, which calls itself `serial@host`."""


class Hosts(Protocol):
    """Connections to other hosts: one a host, made when needed, shared by threads."""

    def open(self, name: str) -> Device:
        """Return a host as a device."""

    def adb(self, name: str) -> HostAdb:
        """Return the adb server of a host; asks nothing yet."""

    def close(self) -> None:
        """Close all connections."""


class DeviceType(Protocol):
    """One type of device.

    Attributes:
        identifier: form of its devices' identifiers.
        identifier_form: the same, in words.
        emulated: whether its devices have no Hexagon processor; `None` if that differs.
    """

    identifier: re.Pattern[str]
    identifier_form: str
    emulated: bool | None = False

    def open(self, devices: "Devices", spec: DeviceSpec, *, start: bool, soc: str | None) -> Device:
        """Reach a device and check that it is usable.

        Args:
            devices: connections to adb servers and hosts.
            start: start a device that is stopped, where that is possible.
            soc: SoC that the device must have; with `start`, one that does not exist is made.
        """
        ...

    def check(self, devices: "Devices", spec: DeviceSpec) -> None:
        """Raise if there is no usable device of that name, without starting one."""
        devices.open(spec)

    def discover(self, devices: "Devices", host: str | None) -> Sequence[DeviceSpec]:  # noqa: ARG002
        """List the devices that exist on this host, or on `host`."""
        return ()

    def preview(self, spec: DeviceSpec) -> Preview:  # noqa: ARG002
        """Return the known facts of a device without reaching it; never raises."""
        return Preview()

    def hosts(self, config: Path | None, adb_ports: Mapping[str, int]) -> Hosts:
        """Return connections to the hosts that such devices are; `linux` alone has them.

        Args:
            config: of SSH; by default `~/.ssh/config`.
            adb_ports: where the adb servers of hosts listen, by the host's name.
        """
        del config, adb_ports
        raise DeviceUnsupportedError("", "a connection", "devices of its type are no hosts")

    def power_cycle(self, spec: DeviceSpec) -> None:
        """Switch a device off and on."""
        reason = "no command is configured: `power_cycle` in pool.yaml names one"
        raise DeviceUnsupportedError(str(spec), "power cycle", reason)

    def on_record(self) -> Sequence[DeviceSpec]:
        """List the devices that this host keeps a record of, without asking anything else."""
        return ()

    def examine_host(self) -> tuple[State, str, str] | None:
        """Tell whether this host can run such devices, with advice; None if it runs none."""
        return None

    def running(
        self, name: str, soc: str, server: "AdbServer", tell: Callable[[str], None]
    ) -> AbstractContextManager[str]:
        """Yield the serial, at an adb server, of a device that runs for the block; its files stay.

        Args:
            name: of the device.
            soc: its SoC.
            server: that is to know it.
            tell: takes remarks for the user.
        """
        del soc, server, tell
        raise DeviceUnsupportedError(name, "a start", "devices of its type exist already")


class AndroidType(DeviceType):
    """Android devices behind this host's adb server, or behind another host's."""

    identifier = re.compile(
        r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]%-]{0,127}"
        r"(?: \([0-9]{1,3}\)[A-Za-z0-9._-]{0,127})?"  # as mDNS names one whose name is taken
        rf"(?:@{HOST})?"
    )
    identifier_form = "SERIAL or SERIAL@HOST"

    def open(
        self,
        devices: "Devices",
        spec: DeviceSpec,
        *,
        start: bool,  # noqa: ARG002
        soc: str | None,  # noqa: ARG002
    ) -> Device:
        """Open a device of an adb server; one at `HOST:PORT` is connected to first."""
        from harness.devices.adb.discovery import connect_tcp, open_device

        if spec.host is not None:
            return devices.hosts().adb(spec.host).open(spec.serial)
        server = devices.adb_server()
        connect_tcp(server, spec.serial)
        return open_device(spec.serial, server=server)

    def discover(self, devices: "Devices", host: str | None) -> Sequence[DeviceSpec]:
        """List the devices of the adb server, but for serials that no device can have.

        A device of another type that runs here behind it, as a virtual one, has its own name.
        """
        named = devices.connect_named() if host is None else {}
        server = devices.adb_server() if host is None else devices.hosts().adb(host)
        behind = "" if host is None else f"@{host}"
        names = {entry.serial: f"{entry.serial}{behind}" for entry in server.devices()}
        return [
            named.get(serial) or DeviceSpec("android", name)
            for serial, name in names.items()
            if self.identifier.fullmatch(name)
        ]

    def preview(self, spec: DeviceSpec) -> Preview:
        """Tell the serial at this host's adb server."""
        return Preview(adb_serial=spec.serial if spec.host is None else None)


class LocalType(DeviceType):
    """This machine."""

    identifier = re.compile("")
    identifier_form = "nothing"
    emulated = None

    def open(
        self,
        devices: "Devices",  # noqa: ARG002
        spec: DeviceSpec,  # noqa: ARG002
        *,
        start: bool,  # noqa: ARG002
        soc: str | None,  # noqa: ARG002
    ) -> Device:
        """Return this machine as a device."""
        from harness.devices.local import LocalTransport

        return Device(LocalTransport())


def find_type(name: str) -> DeviceType:
    """Return the device type of a name.

    Raises:
        WrongUseError: no installed package has it.
    """
    if name not in device_types():
        raise WrongUseError(_missing(name))
    return device_types()[name]


def check_type_name(name: str) -> str:
    """Return the name of a device type; raises `ValueError` for others."""
    if name not in device_types():
        raise ValueError(_missing(name))
    return name


def _missing(name: str) -> str:
    if name in _PLUGINS:
        return f"devices of type {name} come with plugins/{_PLUGINS[name]}, which is not here"
    types = ", ".join(device_types())
    return f"no installed package has devices of type {name}: the type is one of {types}"


class _DeviceTypes(Mapping[str, DeviceType]):
    """The built-in types, then those of entry points, each loaded when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, DeviceType] = {
            "android": AndroidType(),
            "local": LocalType(),
        }
        self._names = tuple(dict.fromkeys((*self._loaded, *entry_names(DOOR))))

    def __getitem__(self, name: str) -> DeviceType:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = load_entry(DOOR, name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@cache
def device_types() -> Mapping[str, DeviceType]:
    """Return all device types by name."""
    return _DeviceTypes()
