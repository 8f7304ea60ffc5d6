"""The device's own root folder, in each kind of namespace."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.virtual_device import manager
from harness.virtual_device.filesystem import DeviceFilesystem
from harness.virtual_device.manager import VirtualDevice
from harness.virtual_device.namespace import (
    FORCE_VARIABLE,
    NamespaceKind,
    probe_namespace,
    try_namespace,
)
from tests.harness.virtual_device.helpers import Adb


def test_none_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "none")
    support = probe_namespace()
    assert support.kind is NamespaceKind.NONE
    assert FORCE_VARIABLE in support.reason


def test_the_probe_says_why_it_is_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_VARIABLE, raising=False)
    support = probe_namespace()
    assert (support.kind is NamespaceKind.ROOT) == (support.reason == "")


def test_no_mount_shows_on_the_host(device: VirtualDevice) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(device.root.parent) not in mounts


def test_a_user_namespace_serves_as_well(
    start_device: Callable[..., VirtualDevice], adb: Adb, tmp_path: Path
) -> None:
    if refused := try_namespace(NamespaceKind.USER):
        pytest.skip(f"no user namespace here: {refused}")
    device = start_device("by-user", namespace=NamespaceKind.USER)
    (tmp_path / "file").write_bytes(bytes(range(256)))
    to = "/data/local/tmp/deep/er/file"
    assert adb("-s", device.serial, "push", tmp_path / "file", to).returncode == 0
    assert adb("-s", device.serial, "exec-out", f"cat {to}").stdout == bytes(range(256))
    output = adb(
        "-s", device.serial, "shell", "-tt", "tty; python3 -c 'print(6 * 7)'; ps -A | wc -l"
    )
    assert b"/dev/pts/" in output.stdout
    assert b"42" in output.stdout
    assert int(output.stdout.split()[-1]) < 10
    assert str(device.root.parent) not in Path("/proc/self/mountinfo").read_text()
    manager.remove("by-user")


_INNER = """
from harness.virtual_device import manager
device = manager.start("inner", "SM8650")
print(device.serial, device.namespace)
"""


def test_a_host_with_things_of_its_own_in_data_keeps_them(
    start_device: Callable[..., VirtualDevice], adb: Adb, connect: Callable[[str], None]
) -> None:
    """A device within a device: the outer one is the host that has a `/data`."""
    outer = start_device("outer")
    if outer.namespace is NamespaceKind.NONE:
        pytest.skip("no namespace here")
    home = os.environ["HOME"]
    setup = "mkdir -p /data/of-the-host && echo kept >/data/of-the-host/file && cd /"
    variables = f"HOME={shlex.quote(home)} QNNFARM_STATE_DIR=/data/local/tmp/state"
    start = f"{setup} && {variables} {sys.executable} -P -c {shlex.quote(_INNER)}"
    output = adb("-s", outer.serial, "shell", start)
    assert output.returncode == 0, output.stderr
    serial, kind = output.stdout.decode().split()
    if kind == "none" and outer.namespace is NamespaceKind.USER:
        manager.remove("outer")
        pytest.skip("no namespace is granted within a user namespace here")
    assert kind != "none"
    connect(serial)
    inside = "cat /data/of-the-host/file; getprop ro.soc.model; echo >$TMPDIR/inner; ls $TMPDIR"
    assert adb("-s", serial, "shell", inside).stdout == b"kept\nSM8650\ninner\n"
    look = "cd /data/local/tmp && ls . state/devices/inner/root/data/local/tmp"
    found = adb("-s", outer.serial, "shell", look)
    assert found.stdout == b".:\nstate\n\nstate/devices/inner/root/data/local/tmp:\ninner\n"
    manager.remove("outer")
    adb("disconnect", serial)


def test_the_host_is_visible_and_its_processes_are_not(
    device: VirtualDevice, on_device: Adb, tmp_path: Path
) -> None:
    (tmp_path / "visible").write_text("yes")
    assert on_device("shell", f"cat '{tmp_path}/visible'").stdout == b"yes"
    seen = on_device("shell", f"test -d /proc/{os.getpid()} && cat /proc/{os.getpid()}/cmdline")
    if device.namespace is not NamespaceKind.NONE:
        assert b"pytest" not in seen.stdout
        assert on_device("shell", "touch /not-here").returncode != 0


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


_AS_NOBODY = """
import sys
from harness.virtual_device import manager
device = manager.start("plain", "SM8750")
print(device.namespace, flush=True)
manager.remove("plain")
"""


def test_a_user_without_privileges_gets_a_user_namespace(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become another user")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = Path("/usr/bin") / version
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    state = Path(tempfile.mkdtemp(prefix="qnnfarm-nobody-"))
    os.chown(state, 65534, 65534)
    packages = [str(Path(__file__).parents[3]), sysconfig.get_path("purelib")]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(state),
        "QNNFARM_STATE_DIR": str(state),
        "PYTHONPATH": ":".join(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*become, *command],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    try:
        if (
            not python.exists()
            or run(str(python), "-c", "import harness.virtual_device.manager").returncode
        ):
            pytest.skip(f"user nobody cannot use this checkout with {python}")
        if run("unshare", "-Urm", "true").returncode:
            pytest.skip("no user namespaces on this machine")
        done = run(str(python), "-c", _AS_NOBODY)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "user\n"
    finally:
        shutil.rmtree(state)
