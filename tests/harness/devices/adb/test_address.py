"""Which adb server the environment names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.adb.connection import ServerAddress, address_from
from harness.errors import AdbServerError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ADB_SERVER_SOCKET": "tcp:lab:5038"}, "lab:5038"),
        ({"ADB_SERVER_SOCKET": "tcp:5038"}, "127.0.0.1:5038"),
        ({"ADB_SERVER_SOCKET": "tcp:[::1]:5038"}, "[::1]:5038"),
        ({"ADB_SERVER_SOCKET": "localfilesystem:/run/a b"}, "localfilesystem:/run/a b"),
        ({"ANDROID_ADB_SERVER_ADDRESS": "lab"}, "lab:5037"),
        ({"ANDROID_ADB_SERVER_HOST": "lab", "ANDROID_ADB_SERVER_PORT": "1"}, "lab:1"),
        ({"ANDROID_ADB_SERVER_HOST": "b", "ANDROID_ADB_SERVER_ADDRESS": "a"}, "a:5037"),
        ({"ADB_SERVER_SOCKET": "tcp:a:1", "ANDROID_ADB_SERVER_PORT": "2"}, "a:1"),
        ({"ADB_SERVER_SOCKET": "", "ANDROID_ADB_SERVER_PORT": "2"}, "127.0.0.1:2"),
    ],
)
def test_the_variables_and_their_order(environ: dict[str, str], expected: str) -> None:
    assert str(address_from(environ)) == expected


def test_no_variable_names_none() -> None:
    assert address_from({"PATH": "/bin", "ADB_SERVER_SOCKET": ""}) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ADB_SERVER_SOCKET", "localfilesystem:tmp/adb"),
        ("ADB_SERVER_SOCKET", "localabstract:adb"),
        ("ADB_SERVER_SOCKET", "tcp:"),
        ("ADB_SERVER_SOCKET", "tcp:host:0"),
        ("ADB_SERVER_SOCKET", "tcp:host:99999"),
        ("ADB_SERVER_SOCKET", "tcp:a b:1"),
        ("ANDROID_ADB_SERVER_PORT", "x"),
        ("ANDROID_ADB_SERVER_PORT", "-1"),
        ("ANDROID_ADB_SERVER_PORT", "٣"),
    ],
)
def test_a_form_that_cannot_be_used_is_wrong_use(variable: str, value: str) -> None:
    with pytest.raises(AdbServerError) as caught:
        address_from({variable: value})
    assert caught.value.exit_code == 2
    assert variable in str(caught.value)


@given(st.text(max_size=40))
def test_no_text_is_accepted_by_half(text: str) -> None:
    try:
        address = address_from({"ADB_SERVER_SOCKET": text})
    except AdbServerError:
        return
    assert address is not None or not text
    assert address is None or 0 < address.port < 65536


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("lab", False), ("10.0.0.1", False)],
)
def test_only_the_loopback_is_local(host: str, local: bool) -> None:
    assert ServerAddress(host).local is local
