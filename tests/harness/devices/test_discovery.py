"""Choosing a device."""

import pytest

from harness.devices.adb.client import AdbDeviceInfo, AdbServer
from harness.devices.adb.connection import ServerAddress
from harness.devices.adb.discovery import open_device
from harness.errors import (
    DeviceNotReadyError,
    DeviceUnauthorizedError,
    NoDeviceError,
    SeveralDevicesError,
)


class _Listing(AdbServer):
    """A server that knows the devices it is given."""

    entries: list[AdbDeviceInfo]

    def devices(self) -> list[AdbDeviceInfo]:
        return self.entries


def _server(**states: str) -> AdbServer:
    return _listing(*(AdbDeviceInfo(serial, state) for serial, state in states.items()))


def _listing(*entries: AdbDeviceInfo) -> AdbServer:
    server = _Listing(ServerAddress(port=1), 41)
    object.__setattr__(server, "entries", list(entries))
    return server


def test_the_only_usable_one_is_the_default() -> None:
    assert open_device(server=_server(a="offline", b="device")).serial == "b"


def test_a_serial_and_the_variable_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _server(a="device", b="device")
    assert open_device("a", server=server).serial == "a"
    monkeypatch.setenv("ANDROID_SERIAL", "b")
    assert open_device(server=server).serial == "b"
    assert open_device("a", server=server).serial == "a"
    monkeypatch.setenv("ANDROID_SERIAL", "c")
    with pytest.raises(NoDeviceError, match=r"'c'; connected: a \(device\), b"):
        open_device(server=server)


def test_several_are_named() -> None:
    with pytest.raises(SeveralDevicesError, match="ANDROID_SERIAL: a, b") as caught:
        open_device(server=_server(a="device", b="device"))
    assert caught.value.exit_code == 2


def test_none_says_what_to_do() -> None:
    with pytest.raises(NoDeviceError, match="qnnfarm device start"):
        open_device(server=_server())


@pytest.mark.parametrize(
    ("state", "advice"),
    [("offline", "plug it in"), ("recovery", "adb reboot"), ("no permissions", "udev")],
)
def test_one_that_is_not_usable_has_the_advice_of_its_state(state: str, advice: str) -> None:
    server = _listing(AdbDeviceInfo("a", state))
    for serial in ("a", None):
        with pytest.raises(DeviceNotReadyError, match=f"in state {state}.*{advice}") as caught:
            open_device(serial, server=server)
        assert caught.value.state == state
        with pytest.raises(DeviceUnauthorizedError):
            open_device(serial, server=_server(a="unauthorized"))


def test_a_serial_that_two_have_is_ambiguous_and_a_usb_port_is_not() -> None:
    twins = [
        AdbDeviceInfo(f"usb:{port}", "device", {"usb": port}, "DUP") for port in ("1-4", "2-1")
    ]
    with pytest.raises(SeveralDevicesError, match=r"have the serial DUP.*usb:1-4, usb:2-1"):
        open_device("DUP", server=_listing(*twins))
    assert open_device("usb:2-1", server=_listing(*twins)).serial == "usb:2-1"
    alone = _listing(AdbDeviceInfo("DUP", "device", {"usb": "2-1"}))
    assert open_device("usb:2-1", server=alone).serial == "usb:2-1"
