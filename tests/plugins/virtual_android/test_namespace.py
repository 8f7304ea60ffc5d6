"""The device's own root folder, in each kind of namespace."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import VirtualDeviceConfinementError, VirtualDeviceError
from plugins.virtual_android import manager
from plugins.virtual_android.filesystem import DeviceFilesystem
from plugins.virtual_android.manager import VirtualDevice
from plugins.virtual_android.namespace import (
    FORCE_VARIABLE,
    NamespaceKind,
    NamespaceSupport,
    probe_namespace,
)
from tests.command_line import Started
from tests.plugins.virtual_android.helpers import Adb
from tests.waiting import PATIENCE_S


def test_none_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "none")
    support = probe_namespace()
    assert support.kind is NamespaceKind.NONE
    assert FORCE_VARIABLE in support.reason


def test_the_probe_says_why_it_is_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_VARIABLE, raising=False)
    support = probe_namespace()
    assert (support.kind is NamespaceKind.ROOT) == (support.reason == "")


@pytest.mark.needs("util-linux", "user-namespaces")
def test_a_limit_of_namespaces_is_no_full_disk() -> None:
    program = "from plugins.virtual_android import linux; linux.unshare(linux.CLONE_NEWUSER)"
    limit = f"echo 0 > /proc/sys/user/max_user_namespaces; exec '{sys.executable}' -c '{program}'"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", limit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "unshare: a limit of /proc/sys/user/max_*_namespaces is 0" in done.stderr, done.stderr


@pytest.mark.needs("util-linux", "user-namespaces")
def test_a_root_without_other_users_is_told_so(tmp_path: Path) -> None:
    attempt = [sys.executable, "-m", "plugins.virtual_android.namespace", "root", str(tmp_path)]
    command = ["unshare", "--user", "--map-root-user", *attempt]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "user namespace has no user" in done.stderr, done.stderr


def test_no_mount_shows_on_the_host(device: VirtualDevice) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(device.root.parent) not in mounts


def test_the_shell_is_androids_user_and_has_what_programs_need(
    device: VirtualDevice, on_device: Adb, tmp_path: Path
) -> None:
    (tmp_path / "visible").write_text("yes")
    seen = on_device("shell", f"cat '{tmp_path}/visible'; test -d /proc/{os.getpid()} && echo yes")
    ran = on_device("shell", "echo 'print(6 * 7)' >$TMPDIR/x.py && python3 $TMPDIR/x.py && date")
    assert ran.stdout.startswith(b"42\n")
    if device.namespace is NamespaceKind.NONE:
        assert b"yes" in seen.stdout
        return
    assert seen.stdout == b""
    who = on_device("shell", "whoami; hostname; echo >/tmp/t; ls $TMPDIR/t").stdout.split()
    assert who == [b"shell", device.name.encode(), b"/data/local/tmp/t"]


@pytest.mark.variant
def test_a_folder_of_other_owners_becomes_the_devices(
    start_device: Callable[..., VirtualDevice], adb: Adb
) -> None:
    """It ran unconfined, or somebody put files there."""
    start_device("changes", unconfined=True)
    adb("-s", manager.get("changes").serial, "shell", "mkdir $TMPDIR/d; echo 1 >$TMPDIR/d/f")
    manager.stop("changes")
    device = start_device("changes", unconfined=False)
    adb("-s", device.serial, "wait-for-device")
    done = adb("-s", device.serial, "shell", "cd $TMPDIR/d && echo 2 >>f && cat f && rm f")
    assert done.stdout == b"1\n2\n", done
    manager.remove("changes")


def test_where_nothing_is_granted_the_user_has_to_say_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = NamespaceSupport(NamespaceKind.NONE, "user namespace: unshare: not permitted")
    monkeypatch.setattr(manager, "expected_namespace", lambda: None)
    monkeypatch.setattr(manager, "probe_namespace", lambda: refused)
    with pytest.raises(VirtualDeviceConfinementError, match=r"not permitted.*--unconfined"):
        manager.start("bare", "SM8750")
    assert manager.list_devices() == []
    try:
        assert not manager.start("bare", "SM8750", unconfined=True).confined
        assert not manager.stop("bare").confined
        again = manager.start("bare", "SM8750")  # as recovery does: the choice stays
        assert (again.state, again.confined) == ("running", False)
        monkeypatch.setenv(FORCE_VARIABLE, "none")
        assert manager.start("bare", "SM8750", unconfined=False).pid == again.pid
        monkeypatch.setenv(FORCE_VARIABLE, "auto")
        with pytest.raises(VirtualDeviceError, match="confinement off, not on"):
            manager.start("bare", "SM8750", unconfined=False)
    finally:
        manager.remove("bare")
    assert not (home / "devices" / "bare").exists()


_REFUSING = """
import ctypes, errno, platform, struct
from harness.cli.app import main
numbers = {"x86_64": (272, 165), "aarch64": (97, 40)}[platform.machine()]  # unshare, mount
program = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the call's number
for number in numbers:  # if it is this one, answer EPERM
    program += struct.pack("HBBI", 0x15, 0, 1, number)
    program += struct.pack("HBBI", 0x06, 0, 0, 0x50000 | errno.EPERM)
program += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # else allow
kept = ctypes.create_string_buffer(program)
described = struct.pack("HxxxxxxN", len(program) // 8, ctypes.addressof(kept))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
assert prctl(22, 2, described, 0, 0) == 0, "PR_SET_SECCOMP"
main()
"""
"""The command where a filter of system calls forbids namespaces, as in many containers."""


def test_the_command_says_in_one_line_that_nothing_is_granted(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "QNNFARM_STATE_DIR": str(tmp_path), FORCE_VARIABLE: "auto"}
    with Started("-c", _REFUSING, "device", "start", "bare", env=environment) as process:
        out, said = process.communicate(timeout=PATIENCE_S)
    assert (process.wait(), out, said.count("\n")) == (2, "", 1)
    assert list((tmp_path / "devices").glob("[!.]*")) == []
    assert "user namespace: [Errno 1] unshare: Operation not permitted" in said
    assert "`qnnfarm device start bare --unconfined`" in said


def test_device_folders_are_mapped_by_name_without_a_namespace(tmp_path: Path) -> None:
    filesystem = DeviceFilesystem(tmp_path, in_namespace=False)
    root = str(tmp_path)
    for path, expected in {
        "/data": f"{root}/data",
        "/data/local/tmp/x": f"{root}/data/local/tmp/x",
        "data/x": f"{root}/data/x",
        "//data//x/": f"{root}/data/x/",
        "/data/../data/y": f"{root}/data/y",
        "/data/../../etc/passwd": "/data/../../etc/passwd",
        "/database": "/database",
        "/vendor/x": "/vendor/x",
        "/": "/",
    }.items():
        assert filesystem.resolve(path) == expected
