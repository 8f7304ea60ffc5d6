"""Devices of an adb server, and the choice of one."""

import os
from types import MappingProxyType

from harness.devices.adb.client import TCP_SERIAL, AdbDeviceInfo, AdbServer
from harness.devices.adb.server import ensure_server
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.errors import (
    DeviceNotReadyError,
    HarnessError,
    NoDeviceError,
    SeveralDevicesError,
)

_RECONNECT = "plug it in again, or try `adb reconnect`"
_REBOOT = "`adb reboot` brings it back into Android"
_WAYS_OUT = MappingProxyType(
    {
        "recovery": _REBOOT,
        "sideload": _REBOOT,
        "rescue": _REBOOT,
        "bootloader": "`fastboot reboot` brings it back into Android",
        "no permissions": "the user who runs the adb server needs a udev rule for its USB vendor",
        "connecting": "wait a moment",
        "authorizing": "wait a moment",
    }
)
"""State of a device that runs no commands -> what to do."""


def connect_tcp(server: AdbServer, serial: str) -> None:
    """Make a server connect to a TCP device that it does not know yet; others are left alone."""
    if TCP_SERIAL.fullmatch(serial):
        states = {entry.serial: entry.state for entry in server.devices()}
        if states.get(serial, "offline") == "offline":
            server.connect(serial)


def open_device(serial: str | None = None, *, server: AdbServer | None = None) -> Device:
    """Return the device that `serial`, else `$ANDROID_SERIAL` names, else the only one there is.

    Raises:
        NoDeviceError: there is none, or not that one.
        SeveralDevicesError: none is named, and several could be meant, or several have that serial.
        DeviceUnauthorizedError, DeviceNotReadyError: it is there, but not usable.
        AdbServerError: see `ensure_server`.
    """
    server = server or ensure_server()
    entries = server.devices()
    name = serial or os.environ.get("ANDROID_SERIAL") or None
    if name is None:
        usable = [entry for entry in entries if entry.usable]
        if len(usable) > 1:
            raise SeveralDevicesError(tuple(entry.serial for entry in usable))
        if not usable and len(entries) == 1:
            raise _unusable(server, entries[0])
        choice = usable[0] if usable else None
    else:
        same = tuple(entry.serial for entry in entries if entry.shared_serial == name)
        if same:
            raise SeveralDevicesError(same, name)
        choice = next((entry for entry in entries if entry.is_named(name)), None)
    if choice is None:
        present = tuple(f"{entry.serial} ({entry.state})" for entry in entries)
        raise NoDeviceError(name, present)
    if not choice.usable:
        raise _unusable(server, choice)
    return Device(AdbTransport(server, name or choice.serial))


def _unusable(server: AdbServer, entry: AdbDeviceInfo) -> HarnessError:
    if entry.state == "unauthorized":
        return server.unauthorized(entry.serial)
    return DeviceNotReadyError(entry.serial, entry.state, _WAYS_OUT.get(entry.state, _RECONNECT))
