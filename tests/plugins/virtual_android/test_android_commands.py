"""Commands of `adb` beyond shell and files: what they do here, or why they do nothing."""

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import adbutils
import pytest

from plugins.virtual_android import manager
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb

_LINE = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} +\d+ +\d+ [IW] virtual_device: ")


@pytest.fixture(scope="session")
def logged(start_device: Callable[..., VirtualDevice], adb: Adb) -> Adb:
    """Runs `adb -s SERIAL logcat` on a device with a boot and a fault behind it."""
    device = start_device("logged")
    manager.control("logged").inject(parse_fault("throttle:factor=3"))
    manager.control("logged").clear()

    def logcat(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return adb("-s", device.serial, "logcat", *arguments)

    return logcat


def _lines(done: "subprocess.CompletedProcess[bytes]") -> list[str]:
    assert done.returncode == 0, done
    header, *lines = done.stdout.decode().splitlines()
    assert header == "--------- beginning of main"
    return lines


def test_logcat_prints_the_devices_events(logged: Adb) -> None:
    lines = _lines(logged("-d"))
    assert all(_LINE.match(line) for line in lines)
    assert [_LINE.sub("", line) for line in lines] == [
        "booted cold", "armed throttle:factor=3", "struck throttle:factor=3",
        "cleared throttle:factor=3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("brief", r"I/virtual_device\( *\d+\): booted cold"),
        ("epoch", r" *\d+\.\d{3} +\d+ +\d+ I virtual_device: booted cold"),
        ("process", r"I\( *\d+\) booted cold  \(virtual_device\)"),
        ("raw", "booted cold"),
        ("tag", r"I/virtual_device: booted cold"),
        ("time", r"\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} I/virtual_device\( *\d+\): booted cold"),
        ("long", r"\[ \d\d-\d\d \S+ +\d+: *\d+ I/virtual_device \]"),
    ],
)
def test_logcat_formats(logged: Adb, name: str, pattern: str) -> None:
    assert re.fullmatch(pattern, _lines(logged("-d", "-v", name))[0])


def test_logcat_filters(logged: Adb) -> None:
    events = [line.split()[0] for line in _lines(logged("-d", "-v", "raw"))]
    assert len(events) == 4

    def chosen(*options: str) -> list[str]:
        return [line.split()[0] for line in _lines(logged("-d", "-v", "raw", *options))]

    assert chosen("*:W") == chosen("virtual_device:W", "*:S") == ["struck"]
    assert chosen("-s", "virtual_device") == chosen("-b", "all") == events
    assert chosen("-s", "other:V") == chosen("*:E") == []
    assert chosen("-t", "2") == ["struck", "cleared"]
    assert chosen("-t", "01-01 00:00:00.000") == events
    stamps = [" ".join(line.split()[:2]) for line in _lines(logged("-d"))]
    assert len(chosen("-t", stamps[2])) == sum(stamp >= stamps[2] for stamp in stamps)
    assert chosen("-t", "12-31 23:59:59.999") == []
    assert logged("-d", "-b", "crash").stdout == b""


@pytest.mark.parametrize("options", [["--pid=1"], ["-v", "protobuf"], ["-g"], ["-v"]])
def test_logcat_says_what_it_cannot(logged: Adb, options: list[str]) -> None:
    done = logged(*options)
    assert done.returncode == 1
    assert done.stderr.startswith(b"logcat: ")
    assert done.stderr.count(b"\n") == 1


def test_logcat_follows_and_is_cleared(
    start_device: Callable[..., VirtualDevice], adb: Adb
) -> None:
    device = start_device("followed")
    following = subprocess.Popen(
        [adbutils.adb_path(), "-s", device.serial, "logcat", "-v", "raw"], stdout=subprocess.PIPE
    )
    assert following.stdout is not None
    try:
        assert following.stdout.readline() == b"--------- beginning of main\n"
        assert following.stdout.readline() == b"booted cold\n"
        manager.control("followed").inject(parse_fault("slow:ms=1"))
        assert following.stdout.readline() == b"armed slow:ms=1\n"
    finally:
        following.send_signal(signal.SIGINT)
        following.communicate()
    assert adb("-s", device.serial, "logcat", "-c").returncode == 0
    left = _lines(adb("-s", device.serial, "logcat", "-d", "-v", "raw"))
    assert not {"booted cold", "armed slow:ms=1"} & set(left)
    manager.remove("followed")


def test_commands_that_need_android_fail_with_one_line(on_device: Adb, tmp_path: Path) -> None:
    package = tmp_path / "app.apk"
    package.write_bytes(b"PK")
    for arguments in (
        ("install", package), ("uninstall", "org.example"), ("shell", "pm list packages"),
        ("shell", "am start org.example"), ("shell", "cmd package list packages"),
    ):  # fmt: skip
        done = on_device(*arguments)
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == 1, (arguments, done)
        assert sum("a virtual device of qnnfarm has no" in line for line in said.splitlines()) == 1


def test_a_bug_report_says_in_one_line_why_there_is_none(on_device: Adb, tmp_path: Path) -> None:
    done = on_device("bugreport", tmp_path / "report.zip")
    assert done.returncode != 0, done
    assert b"a virtual device of qnnfarm makes no bug report" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_remount_fails_and_root_answers_as_a_phone_does(on_device: Adb) -> None:
    """`adb root` prints the refusal of every adbd and exits 0 unless that restarts."""
    remounted = on_device("remount")
    assert (remounted.returncode, remounted.stdout) == (1, b"")
    assert b"a virtual device of qnnfarm has no partitions" in remounted.stderr
    rooted = on_device("root")
    assert (rooted.returncode, rooted.stdout) == (
        0, b"adbd cannot run as root in production builds\n",
    )  # fmt: skip
