"""What names a device, and what cannot."""

import pytest

from harness.devices.spec import DeviceSpec
from harness.errors import WrongUseError

needs_virtual = pytest.mark.needs("plugins.virtual_android")
needs_ssh = pytest.mark.needs("plugins.ssh_devices")


@pytest.mark.parametrize(
    ("text", "kind", "serial", "host"),
    [
        ("R5CT10", "android", "R5CT10", None),
        pytest.param(
            "adb-X-y (2)._adb-tls@h", "android", "adb-X-y (2)._adb-tls", "h", marks=needs_ssh
        ),
        ("192.168.1.7:5555", "android", "192.168.1.7:5555", None),
        pytest.param("android:R5CT10@lab-3", "android", "R5CT10", "lab-3", marks=needs_ssh),
        pytest.param(
            "android:[::1]:5555@me@lab-3", "android", "[::1]:5555", "me@lab-3", marks=needs_ssh
        ),
        pytest.param("linux:me@rb5.local", "linux", "me", "me@rb5.local", marks=needs_ssh),
        pytest.param("virtual:alpha", "virtual", "alpha", None, marks=needs_virtual),
        ("local", "local", "", None),
    ],
)
def test_it_is_read(text: str, kind: str, serial: str, host: str | None) -> None:
    spec = DeviceSpec.parse(text)
    assert (spec.type, spec.serial, spec.host) == (kind, serial, host)
    assert DeviceSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    ["", "android:", "linux:-oProxyCommand=x", "android:a;b", "virtual:a/b", "android:-s@h",
     "a@-h"],
)  # fmt: skip
def test_identifiers_like_options_or_commands_are_refused(text: str) -> None:
    with pytest.raises(WrongUseError, match="names no device"):
        DeviceSpec.parse(text)


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(WrongUseError, match="the type is one of android, local"):
        DeviceSpec("ios", "x")
