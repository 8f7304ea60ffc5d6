"""Commands on a device, through the real adb."""

import os
import select
import struct
import subprocess
import time
from pathlib import Path

import adbutils
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.virtual_android.manager import VirtualDevice
from plugins.virtual_android.shell import ShellRequest, parse_shell_service, parse_window_size
from tests.plugins.virtual_android.helpers import Adb, new_marker, running
from tests.waiting import wait_for


def test_exec_in_arrives_whole_although_the_client_leaves_at_once(on_device: Adb) -> None:
    data = os.urandom(2_000_000)
    on_device(
        "exec-in",
        "cat >$TMPDIR/exec-in.part && mv $TMPDIR/exec-in.part $TMPDIR/exec-in",
        stdin=data,
    )
    wait_for(lambda: on_device("shell", "test -e $TMPDIR/exec-in").returncode == 0)
    assert on_device("exec-out", "cat $TMPDIR/exec-in").stdout == data


def test_the_old_shell_protocol_mixes_both_outputs(on_device: Adb) -> None:
    done = on_device("shell", "-x", "echo out; echo err >&2; exit 7")
    assert done.stdout == b"out\nerr\n"


def test_a_command_on_a_pseudo_terminal(on_device: Adb) -> None:
    done = on_device(
        "shell", "-tt", "test -t 0 && test -t 1 && tty && echo $TERM && : </dev/tty && stty -a"
    )
    assert done.returncode == 0
    assert done.stdout.startswith(b"/dev/pts/")


def test_an_interactive_shell(on_device: Adb) -> None:
    done = on_device("shell", "-tt", stdin=b"echo $((6 * 7))\nexit 5\n")
    assert b"42" in done.stdout
    assert done.returncode == 5


def test_the_environment_is_the_devices_own(on_device: Adb) -> None:
    lines = on_device("shell", "env").stdout.decode().splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert {"TMPDIR", "HOME", "PATH", "ANDROID_ROOT", "ANDROID_DATA", "HOSTNAME"} <= names
    own = {name for name in os.environ if name.startswith(("PYTEST", "QNNFARM", "ADB"))}
    assert own
    assert not names & own
    assert on_device("shell", "pwd").stdout == b"/\n"


def test_python_runs_without_the_hosts_packages(on_device: Adb) -> None:
    code = "import json, sys; print(sys.version_info >= (3, 8))"
    assert on_device("shell", f"python3 -c '{code}'").stdout == b"True\n"
    assert on_device("shell", "python3 -c 'import pytest' 2>/dev/null").returncode == 1


def test_a_killed_client_takes_its_process_group_along(device: VirtualDevice) -> None:
    marker = new_marker()
    command = f"trap '' HUP; sleep {marker} & sleep {marker}"
    client = subprocess.Popen(
        [adbutils.adb_path(), "-s", device.serial, "shell", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    wait_for(lambda: len(running(marker)) == 2)
    client.kill()
    client.communicate()
    wait_for(lambda: not running(marker))


@pytest.mark.parametrize("options", [[], ["-x"], ["-tt"]], ids=["v2", "old", "terminal"])
def test_a_background_process_does_not_hold_the_command(on_device: Adb, options: list[str]) -> None:
    marker = new_marker()
    done = on_device("shell", *options, f"trap '' HUP; sleep {marker} & echo $!; exit 7")
    assert done.returncode == (0 if "-x" in options else 7)
    assert len(running(marker)) == 1
    on_device("shell", f"kill {done.stdout.decode()}")
    wait_for(lambda: not running(marker))


def test_no_zombies_stay(device: VirtualDevice, on_device: Adb) -> None:
    on_device("shell", "(sleep 0.1 &) ; (sleep 0.2 &) ; exit 0")
    wait_for(
        lambda: (
            b" Z"
            not in on_device("shell", "ps -A -o stat,args 2>/dev/null | grep defunct; true").stdout
        )
    )


def test_a_waiting_reader_stops_the_writer(device: VirtualDevice) -> None:
    def resident_kb() -> int:
        status = Path(f"/proc/{device.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    before = resident_kb()
    command = "yes | head -c 40000000; echo done >&2"
    client = subprocess.Popen(
        [adbutils.adb_path(), "-s", device.serial, "exec-out", command], stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    try:
        assert select.select([client.stdout], [], [], 200)[0]
        time.sleep(0.5)
        assert resident_kb() < before + 20_000
        assert len(client.stdout.read()) == 40_000_000 + len("done\n")
    finally:
        client.kill()
        client.communicate()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"shell:", ShellRequest(None, packets=False, terminal=True)),
        (b"shell:ls", ShellRequest(b"ls", packets=False, terminal=False)),
        (b"shell,v2:", ShellRequest(None, packets=True, terminal=True)),
        (b"shell,v2,raw:a:b", ShellRequest(b"a:b", packets=True, terminal=False)),
        (
            b"shell,v2,TERM=xterm-256color,pty:top",
            ShellRequest(b"top", packets=True, terminal=True, term="xterm-256color"),
        ),
        (b"shell,v2,TERM=$(reboot):x", ShellRequest(b"x", packets=True, terminal=False)),
        (b"exec:cat", ShellRequest(b"cat", packets=False, terminal=False)),
        (b"exec,v2:cat", None),
        (b"shells:", None),
        (b"shell", None),
        (b"sync:", None),
    ],
)
def test_service_names(name: bytes, expected: ShellRequest | None) -> None:
    assert parse_shell_service(name) == expected


def test_window_size() -> None:
    assert parse_window_size(b"24x80,640x480\0") == struct.pack("@4H", 24, 80, 640, 480)
    assert parse_window_size(b"99999x1,0x0") is None


@given(st.binary(max_size=64))
def test_no_window_size_and_no_name_breaks_the_parser(data: bytes) -> None:
    parse_window_size(data)
    parse_shell_service(data)
