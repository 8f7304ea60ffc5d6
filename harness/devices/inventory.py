"""Devices with their state and properties, all queried in parallel."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from harness.devices.adb.client import AdbDeviceInfo
from harness.devices.adb.transport import AdbTransport
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.devices.devices import Devices
from harness.devices.spec import DeviceSpec, device_types
from harness.errors import (
    AdbServerError,
    DeviceError,
    DeviceNotReadyError,
    HarnessError,
    HostError,
    NoDeviceError,
    WrongUseError,
    one_line,
)

_USABLE = "device"
_AT_ONCE = 64

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A device as it was found.

    Attributes:
        spec: `None` if its serial is none that could be asked for.
        serial: how the adb server knows it, where it is behind one, else how it is addressed. It
            is the name in `spec` but for devices that share one, and virtual ones.
        state: `device` when usable, else in the adb server's words, or `absent`, `unreachable`.
        error: why it says nothing of itself, on one line; empty when it does.
    """

    spec: DeviceSpec | None
    serial: str
    state: str
    properties: DeviceProperties | None = None
    error: str = ""


def all_of(devices: Devices, *, timeout_s: float = 10.0) -> list[Sighting]:
    """Return the devices of this host's adb server, in its order, by their own names if any."""
    names = devices.connect_named()
    server = devices.adb_server()

    def look(entry: AdbDeviceInfo) -> Sighting:
        try:
            spec = names.get(entry.serial) or DeviceSpec("android", entry.serial)
        except WrongUseError as error:
            return Sighting(None, one_line(entry.serial), one_line(entry.state), error=str(error))
        if not entry.usable:
            return Sighting(spec, entry.shared_serial or entry.serial, one_line(entry.state))
        name = entry.serial if spec.type == "android" else str(spec)
        device = Device(AdbTransport(server, entry.serial, shown=name))
        return _ask(spec, device, entry.shared_serial or entry.serial, timeout_s)

    return _at_once(look, server.devices())


def named(
    devices: Devices,
    specs: Sequence[DeviceSpec],
    *,
    timeout_s: float = 10.0,
) -> list[Sighting]:
    """Return the devices that `specs` name, in order, each with its error if it has one."""

    def look(spec: DeviceSpec) -> Sighting:
        try:
            device = devices.open(spec)
        except HarnessError as error:
            state = error.state if isinstance(error, DeviceNotReadyError) else error.device_state
            return Sighting(spec, spec.identifier or str(spec), state, error=str(error))
        serial = device_types()[spec.type].preview(spec).adb_serial if spec.host is None else None
        return _ask(spec, device, serial or device.serial, timeout_s)

    return _at_once(look, specs)


def _ask(spec: DeviceSpec, device: Device, serial: str, timeout_s: float) -> Sighting:
    try:
        properties = device.properties(timeout_s=timeout_s)
    except (DeviceError, HostError, NoDeviceError, AdbServerError) as error:
        return Sighting(spec, serial, _USABLE, error=str(error))
    return Sighting(spec, serial, _USABLE, properties)


def _at_once(look: Callable[[Item], Sighting], items: Iterable[Item]) -> list[Sighting]:
    """Run each item in a thread of its own, so that one that hangs costs the others nothing."""
    every = list(items)
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(every)))) as threads:
        return list(threads.map(look, every))
