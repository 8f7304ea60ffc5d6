"""A pool with a host that has devices: a real OpenSSH server, and a second adb server behind it."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import ServerAddress
from harness.devices.adb.server import ensure_server, find_adb, resolve_server
from harness.devices.spec import DeviceSpec
from harness.errors import PoolError
from harness.pool.config import DeviceEntry, parse_config
from harness.pool.members import Member
from harness.pool.opener import Opener
from plugins.virtual_android import manager
from tests.conftest import kill_server
from tests.plugins.ssh_devices.ssh_server import SshServer, running_ssh_server


@dataclass
class Lab:
    """A host `farm` whose configuration for SSH tells the port of its adb server."""

    ssh: SshServer
    server: AdbServer
    serial: str

    def opener(self, hosts: str = "{}") -> Opener:
        text = f"{{devices: [{{discover: adb, host: farm}}], hosts: {hosts}}}"
        return Opener(parse_config(text, "pool.yaml"))


@pytest.fixture
def lab(
    adb_environment: Path,
    tmp_path: Path,
    new_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    tools, ssh_folder = tmp_path / "tools", tmp_path / ".ssh"
    tools.mkdir()
    (tools / "adb").symlink_to(find_adb())
    ssh_folder.mkdir()
    name = f"farm-{os.getpid()}"
    virtual = manager.start(name, "SM8650")
    address = ServerAddress("127.0.0.1", new_port())
    on_host = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": os.environ["HOME"]}
    on_host |= {key: value for key, value in os.environ.items() if key.startswith("ADB_L")}
    with running_ssh_server(ssh_folder, new_port(), on_host) as ssh:
        ssh.configure(f"SetEnv ANDROID_ADB_SERVER_PORT={address.port}", host="farm")
        server = ensure_server(address)
        server.connect(virtual.serial)
        monkeypatch.setenv("HOME", str(tmp_path))
        yield Lab(ssh, server, virtual.serial)
    manager.remove(name)
    kill_server(address)


def test_its_adb_server_is_asked_for_devices_and_restarted_where_that_is_allowed(lab: Lab) -> None:
    with closing(lab.opener()) as opener:
        (spec,) = opener.discover(DeviceEntry(discover="adb", host="farm"))
        assert spec == DeviceSpec("android", f"{lab.serial}@farm")
        member = Member("one", spec)
        assert opener.open(member).shell("echo here").stdout == "here\n"
        assert lab.ssh.log.read_text().count("Accepted publickey") == 1
        with pytest.raises(PoolError, match="does not say that it is ours"):
            opener.restart_server(member)
        assert resolve_server(lab.server.address).state(lab.serial) == "device"
    with closing(lab.opener("{farm: {adb_server_ours: true}}")) as opener:
        opener.open(member)
        opener.restart_server(member)
        # The new one knows no device: those by TCP are connected to when they are used again.
        assert resolve_server(lab.server.address).devices() == []
        opener.forget(member)
        assert opener.open(member).shell("echo back").stdout == "back\n"
