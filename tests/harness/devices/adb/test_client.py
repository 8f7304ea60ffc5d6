"""Reading the list of devices, and connecting to one."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from harness.devices.adb.client import AdbServer, parse_devices
from tests.conftest import MakeDevice

_ANSWER = """\
R58N12ABCDE            device usb:1-4 product:e3q model:SM_S928B device:e3q transport_id:3
127.0.0.1:5555         offline transport_id:9
QV710                  unauthorized usb:2-1 transport_id:4
????????????           no permissions (in plugdev; rules?); see [http://x/y] usb:3-1 transport_id:7

"""


def test_states_and_details() -> None:
    entries = parse_devices(_ANSWER)
    assert [(entry.serial, entry.state, entry.usable) for entry in entries] == [
        ("R58N12ABCDE", "device", True),
        ("127.0.0.1:5555", "offline", False),
        ("QV710", "unauthorized", False),
        ("????????????", "no permissions", False),
    ]
    assert entries[0].details["model"] == "SM_S928B"
    assert entries[3].details["transport_id"] == "7"


def test_devices_that_share_a_serial_are_named_by_their_usb_ports() -> None:
    twins = "X1 device usb:1-4 transport_id:3\nX1 recovery usb:2-1.2 transport_id:4\n"
    entries = parse_devices(f"{twins}Y2 device usb:1-5 transport_id:5\n")
    assert [(entry.serial, entry.shared_serial) for entry in entries] == [
        ("usb:1-4", "X1"),
        ("usb:2-1.2", "X1"),
        ("Y2", ""),
    ]
    assert entries[2].is_named("Y2")
    assert entries[2].is_named("usb:1-5")  # also once its twin is gone
    assert not entries[2].is_named("usb:1-4")


def test_twins_without_usb_ports_keep_their_serial() -> None:
    entries = parse_devices("X1 device transport_id:3\nX1 device transport_id:4\n")
    assert [entry.serial for entry in entries] == ["X1", "X1"]


def test_a_device_without_a_serial_is_named_by_its_usb_port() -> None:
    line = "(no serial number)     device usb:1-4 product:e3q transport_id:3\n"
    (entry,) = parse_devices(line)
    assert (entry.serial, entry.state, entry.usable) == ("usb:1-4", "device", True)
    assert entry.shared_serial == "(no serial number)"
    (entry,) = parse_devices("(no serial number) no permissions; see [http://x] transport_id:3")
    assert (entry.serial, entry.state) == ("(no serial number)", "no permissions")


def test_serials_with_blanks() -> None:
    """As mDNS names a device whose name is taken, and as a state that a later adb may have."""
    second = "adb-R5CR10-abc (2)._adb-tls-connect._tcp"
    lines = f"{second} device product:x\n{second} offline\nX1 thinking usb:1-4\n"
    assert [(entry.serial, entry.state) for entry in parse_devices(lines)] == [
        (second, "device"),
        (second, "offline"),
        ("X1", "thinking"),
    ]


@given(st.text(max_size=200))
def test_any_answer_is_survived(answer: str) -> None:
    for entry in parse_devices(answer):
        assert entry.serial.strip() == entry.serial != ""


def test_many_connect_to_one_device_at_once(
    adb_server: AdbServer, make_virtual_device: MakeDevice
) -> None:
    """What one is connecting, another took for a connection gone bad, and ended."""
    virtual, _ = make_virtual_device()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            adb_server.disconnect(virtual.serial)
            list(threads.map(adb_server.connect, [virtual.serial] * 8))
            assert adb_server.state(virtual.serial) == "device"
