"""Devices of an adb server, and the choice of one."""

import os
import re

from harness.devices.adb.client import AdbServer, DeviceEntry
from harness.devices.adb.device import AdbDevice
from harness.devices.adb.server import ensure_server
from harness.errors import (
    DeviceLostError,
    HarnessError,
    NoDeviceError,
    SeveralDevicesError,
)

__all__ = ["DeviceEntry", "connect_tcp", "list_devices", "open_device"]

_TCP_SERIAL = re.compile(r".+:\d{1,5}")


def list_devices(server: AdbServer | None = None) -> list[DeviceEntry]:
    """Return all devices of the adb server, in whatever state.

    Raises:
        AdbServerError: see `ensure_server`.
    """
    return (server or ensure_server()).devices()


def connect_tcp(server: AdbServer, serial: str) -> None:
    """Make a server connect to a TCP device that it does not know yet; others are left alone.

    Raises:
        DeviceConnectError: it cannot.
        AdbServerError: the server cannot be reached.
    """
    if _TCP_SERIAL.fullmatch(serial):
        states = {entry.serial: entry.state for entry in server.devices()}
        if states.get(serial, "offline") == "offline":
            server.connect(serial)


def open_device(serial: str | None = None, *, server: AdbServer | None = None) -> AdbDevice:
    """Return the device that `serial`, else `$ANDROID_SERIAL` names, else the only one there is.

    Raises:
        NoDeviceError: there is none, or not that one.
        SeveralDevicesError: none is named, and several could be meant.
        DeviceUnauthorizedError, DeviceLostError: it is there, but not usable.
        AdbServerError: see `ensure_server`.
    """
    server = server or ensure_server()
    entries = server.devices()
    wanted = serial or os.environ.get("ANDROID_SERIAL") or None
    if wanted is None:
        usable = [entry for entry in entries if entry.usable]
        if len(usable) > 1:
            raise SeveralDevicesError(tuple(entry.serial for entry in usable))
        if not usable and len(entries) == 1:
            raise _unusable(server, entries[0])
        chosen = usable[0] if usable else None
    else:
        chosen = next((entry for entry in entries if entry.serial == wanted), None)
    if chosen is None:
        present = tuple(f"{entry.serial} ({entry.state})" for entry in entries)
        raise NoDeviceError(wanted, present)
    if not chosen.usable:
        raise _unusable(server, chosen)
    return AdbDevice(server, chosen.serial)


def _unusable(server: AdbServer, entry: DeviceEntry) -> HarnessError:
    if entry.state == "unauthorized":
        return server.unauthorized(entry.serial)
    return DeviceLostError(entry.serial, "opening it", f"the adb server says: {entry.state}")
