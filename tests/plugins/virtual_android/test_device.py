"""Properties, forwards, reboots and the end of a device."""

import os
import signal
from collections.abc import Callable

import pytest

from plugins.virtual_android import manager
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb, new_marker, running
from tests.system import needs
from tests.waiting import wait_for


def test_getprop_answers_like_a_device_of_its_soc(on_device: Adb) -> None:
    listed = on_device("shell", "getprop").stdout.decode().splitlines()
    assert "[ro.soc.model]: [SM8750]" in listed
    assert "[ro.kernel.qemu]: [1]" in listed
    assert "[sys.boot_completed]: [1]" in listed
    assert len(listed) == len(set(listed))
    for key, value in (
        ("ro.soc.manufacturer", "QTI"),
        ("ro.product.cpu.abi", "x86_64"),
        ("ro.product.model", "qnnfarm virtual SM8750"),
        ("no.such.thing", ""),
        ("../device.json", ""),
    ):
        assert on_device("shell", f"getprop {key}").stdout.decode() == f"{value}\n"
    assert on_device("shell", "getprop no.such.thing fallback").stdout == b"fallback\n"


def test_setprop_sets_but_not_what_is_read_only(on_device: Adb) -> None:
    assert on_device("shell", "setprop debug.a 'x  y' && getprop debug.a").stdout == b"x  y\n"
    for key in ("ro.soc.model", "../escaped", ".hidden", "''"):
        assert on_device("shell", f"setprop {key} z").returncode == 1
    assert on_device("shell", "getprop ro.soc.model").stdout == b"SM8750\n"


def test_reboot_kills_everything_and_comes_back(
    device: VirtualDevice, on_device: Adb, adb: Adb
) -> None:
    marker = new_marker()
    path = "${QNNFARM_BOOT_ID:-/proc/sys/kernel/random/boot_id}"
    boot_id = f"cat {path}; getprop ro.runtime.firstboot"
    before = on_device("shell", boot_id).stdout.split()
    on_device("shell", f"setsid sleep {marker} </dev/null >/dev/null 2>&1 & sleep 0.2")
    on_device("shell", "echo kept >$TMPDIR/kept; setprop debug.gone 1; setprop persist.kept 2")
    wait_for(lambda: len(running(marker)) == 1)
    if device.namespace == "none":
        assert on_device("reboot").returncode == 0
    else:
        on_device("shell", "reboot; sleep 60")
    wait_for(lambda: not running(marker))

    def back() -> bool:
        adb("connect", device.serial)
        return on_device("shell", "getprop sys.boot_completed").stdout == b"1\n"

    wait_for(back)
    after = on_device("shell", boot_id).stdout.split()
    assert not set(after) & set(before)
    output = on_device("shell", "cat $TMPDIR/kept; getprop debug.gone; getprop persist.kept").stdout
    assert output == b"kept\n\n2\n"


@pytest.mark.parametrize(
    "command",
    ["getprop -Z", "setprop one", "uptime -p", "reboot bootloader", "settings reset global all",
     "dumpsys battery set level 5", "dumpsys meminfo", "cmd package list packages",
     "svc wifi enable", "input tap 1 1", "sync /none"],
)  # fmt: skip
def test_unsupported_uses_of_commands_fail(on_device: Adb, command: str) -> None:
    done = on_device("shell", command)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_process_outlives_its_device(
    start_device: Callable[..., VirtualDevice], adb: Adb, end: str
) -> None:
    device = start_device("mortal")
    marker = new_marker()
    adb(
        "-s",
        device.serial,
        "shell",
        f"setsid sh -c 'setsid sleep {marker} & sleep {marker}' </dev/null >/dev/null 2>&1 &"
        " sleep 0.3",
    )
    wait_for(lambda: len(running(marker)) == 2)
    if end == "kill":
        needs("namespaces")  # the kernel ends all of a PID namespace
        assert device.pid is not None
        os.kill(device.pid, signal.SIGKILL)
        wait_for(lambda: manager.get("mortal").state == "stopped")
    manager.stop("mortal")
    wait_for(lambda: not running(marker))
    manager.remove("mortal")
