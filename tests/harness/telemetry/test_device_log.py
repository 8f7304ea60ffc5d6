"""The log of the last seconds, from programs as a phone and a board have them."""

import sys
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.telemetry.device_log import MOST_BYTES, read_device_log

LOGCAT = """#!/bin/sh
echo "$@"
"""
DMESG = """#!/bin/sh
up=$(cut -d . -f 1 /proc/uptime)
echo "[    1.000000] old"
echo "continued"
echo "[$((up - 5)).123456] recent"
echo "continued too"
echo "[$up.000000] now"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def install(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_the_kernels_messages_of_the_time_are_read(programs: Path) -> None:
    install(programs, "dmesg", DMESG)
    lines = read_device_log(Device(LocalTransport()), 20.0)["dmesg"].splitlines()
    assert [line.partition("] ")[2] or line for line in lines] == [
        "recent", "continued too", "now"
    ]  # fmt: skip


def test_nothing_in_the_time_is_told(programs: Path) -> None:
    install(programs, "dmesg", '#!/bin/sh\necho "[    0.000001] boot"\n')
    assert read_device_log(Device(LocalTransport()), 0.0)["dmesg"] == "(nothing in this time)\n"


def test_logcat_is_asked_for_the_time_alone(programs: Path) -> None:
    install(programs, "logcat", LOGCAT)
    install(programs, "date", "#!/bin/sh\necho 1000100\n")
    words = read_device_log(Device(LocalTransport()), 99.0)["logcat"].split()
    assert words == ["-d", "-b", "main,system,crash", "-v", "threadtime", "-T", "1000000.0"]


def test_a_log_without_end_is_cut(programs: Path) -> None:
    flood = f'#!/bin/sh\nexec {sys.executable} -c \'print("x" * 5_000_000, "end")\'\n'
    install(programs, "logcat", flood)
    text = read_device_log(Device(LocalTransport()), 1.0)["logcat"]
    assert len(text) == MOST_BYTES
    assert text.endswith("x end\n")


def test_a_phone_that_forbids_dmesg_says_so(programs: Path) -> None:
    install(programs, "dmesg", "#!/bin/sh\necho 'dmesg: klogctl: Permission denied' >&2; exit 1\n")
    assert "Permission denied" in read_device_log(Device(LocalTransport()), 1.0)["dmesg"]


def test_a_board_has_no_logcat(programs: Path) -> None:
    install(programs, "dmesg", DMESG)
    assert set(read_device_log(Device(LocalTransport()), 1.0)) == {"dmesg"}
