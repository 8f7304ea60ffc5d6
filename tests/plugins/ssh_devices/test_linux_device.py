"""A board over a real OpenSSH server: what only a host over a network can do wrong."""

import contextlib
import hashlib
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import paramiko
import pytest

from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.errors import (
    DeviceCommandError,
    DeviceFullError,
    DeviceLostError,
    DeviceTimeoutError,
    DeviceTransferError,
    DeviceUnsupportedError,
)
from plugins.ssh_devices.host import SshHost
from plugins.ssh_devices.transport import SshTransport
from tests.plugins.ssh_devices.ssh_server import SshServer, running_ssh_server
from tests.system import needs, program
from tests.waiting import is_alive, wait_for

MakeBoard = Callable[..., tuple[SshServer, Device]]


@pytest.fixture
def make_board(tmp_path: Path, new_port: Callable[[], int]) -> Iterator[MakeBoard]:
    """Makes boards that a test may break: `make_board(PATH=...)` sets variables there."""
    with ExitStack() as stack:

        def make(**environment: str) -> tuple[SshServer, Device]:
            folder = tmp_path / "ssh"
            folder.mkdir()
            server = stack.enter_context(running_ssh_server(folder, new_port(), environment))
            host = stack.enter_context(SshHost.named("board", server.config))
            return server, Device(SshTransport(host))

        yield make


_STAYS = "trap '' HUP; setsid sh -c 'echo $$; exec sleep 3600' & wait"


def test_a_connection_lost_in_a_command_leaves_nothing_there(make_board: MakeBoard) -> None:
    server, device = make_board()
    seen = bytearray()

    def drop(data: bytes) -> None:
        seen.extend(data)
        server.drop_connections()

    with pytest.raises(DeviceLostError, match="went away during"):
        device.stream(_STAYS, on_output=drop, timeout_s=60)
    wait_for(lambda: not is_alive(int(seen)))
    assert device.shell("echo again").stdout == "again\n"


def test_jobs_that_survived_are_killed_before_the_next_command(make_board: MakeBoard) -> None:
    server, device = make_board()
    seen = bytearray()

    def stop(data: bytes) -> None:
        seen.extend(data)
        server.stop(commands_too=False)

    with pytest.raises(DeviceLostError):
        device.stream(_STAYS, on_output=stop, timeout_s=60)
    with pytest.raises(DeviceLostError, match="refused"):
        device.shell("true")
    assert Path(f"/proc/{int(seen)}").exists()
    server.start()
    assert device.shell("echo back").stdout == "back\n"
    wait_for(lambda: not is_alive(int(seen)))


def test_a_connection_lost_in_a_transfer(
    make_board: MakeBoard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server, device = make_board()
    device.shell(["truncate", "-s", "64G", f"{device.work_root}/endless"])
    with pytest.raises(DeviceLostError, match="pull of endless"):
        device.pull(
            f"{device.work_root}/endless",
            tmp_path / "back",
            on_progress=lambda _: server.drop_connections(),
        )
    assert not list(tmp_path.glob("*back*"))
    local = tmp_path / "big"
    local.touch()
    os.truncate(local, 1 << 30)
    with pytest.raises(DeviceLostError, match="push of big"):
        device.push(
            local, f"{device.work_root}/big", on_progress=lambda _: server.drop_connections()
        )
    assert "big" not in device.shell(["ls", "-A", device.work_root]).stdout.split()
    assert capfd.readouterr() == ("", "")  # no thread of a transfer prints a traceback


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    needs("root", "namespaces")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    subprocess.run(mount, check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("kind", ["linux", "local"])
def test_a_full_device(make_board: MakeBoard, small: Path, tmp_path: Path, kind: str) -> None:
    device = make_board()[1] if kind == "linux" else Device(LocalTransport())
    local = tmp_path / "file"
    local.write_bytes(b"x" * (4 << 20))
    with pytest.raises(DeviceFullError) as caught:
        device.push(local, f"{small}/file")
    assert caught.value.path == f"{small}/file"
    assert caught.value.needed_bytes == 4 << 20
    assert list(small.iterdir()) == []


def test_the_work_root_is_ours_and_lets_programs_run(
    make_board: MakeBoard, small: Path, tmp_path: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,noexec", small], check=True)
    _, device = make_board(TMPDIR=str(small))
    assert device.work_root == str(tmp_path / "ssh" / "home" / ".cache" / "qnnfarm-device")
    assert device.shell(["stat", "-c", "%a", device.work_root]).stdout == "700\n"


def test_the_work_root_is_no_link(make_board: MakeBoard, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "qnnfarm").symlink_to(trap)
    _, device = make_board(TMPDIR=str(tmp_path / "shared"))
    assert device.work_root.startswith(str(tmp_path / "ssh" / "home"))
    assert list(trap.iterdir()) == []


def test_a_shell_of_another_kind_and_odd_variables(make_board: MakeBoard) -> None:
    _, device = make_board(IFS="x", CDPATH="/", POSIXLY_CORRECT="1")
    assert device.shell(["printf", "<%s>", "axb", "$HOME"]).stdout == "<axb><$HOME>"


def test_a_reboot_that_is_refused_and_one_that_never_comes(
    make_board: MakeBoard, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    path = shlex.quote(f"{tools}:/usr/bin:/bin")
    for name in ("reboot", "sudo"):
        (tools / name).write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
        (tools / name).chmod(0o755)
    _, device = make_board(PATH=path)
    assert device.shell("command -v reboot").stdout == f"{tools}/reboot\n"
    with pytest.raises(DeviceCommandError, match="not today"):
        device.reboot()
    for neither in ("exit 0", "exec sleep 3600"):
        for name in ("reboot", "sudo"):
            (tools / name).write_text(f"#!/bin/sh\n{neither}\n")
        with pytest.raises(DeviceTimeoutError, match=r"reboot took longer than 1 s"):
            device.reboot(timeout_s=1)


def test_an_account_that_runs_no_commands_is_told_in_its_own_words(make_board: MakeBoard) -> None:
    server, device = make_board()
    said = "This account is currently not available."
    keys = server.authorized_keys
    keys.write_text(f'command="echo {said}; exit 1" {keys.read_text()}')
    server.drop_connections()
    for ask in (device.boot_id, device.properties, lambda: device.shell("true", check=False)):
        with pytest.raises(DeviceCommandError) as caught:
            ask()
        assert str(caught.value).endswith(f": its shell failed with status 1: {said}")


def test_a_reboot_while_which_nobody_is_let_in(make_board: MakeBoard, tmp_path: Path) -> None:
    """As by pam_nologin, until a machine has come up."""
    tools, boot = tmp_path / "tools", tmp_path / "boot_id"
    tools.mkdir()
    boot.write_text("first\n")
    server, device = make_board(PATH=shlex.quote(f"{tools}:/usr/bin:/bin"))
    keys, away = server.authorized_keys, tmp_path / "away"
    scripts = {
        "cat": f'case $1 in */boot_id) exec /bin/cat {boot} ;; esac\nexec /bin/cat "$@"',
        "reboot": f"mv {keys} {away}",
        "sudo": 'shift\nexec "$@"',  # asked by users other than root, with `-n`
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    given_up = threading.Event()

    def wait_until(holds: Callable[[], bool]) -> None:
        while not holds() and not given_up.is_set():
            time.sleep(0.02)

    def go_down_and_come_up() -> None:
        wait_until(away.exists)
        server.drop_connections()
        refused = "Connection closed by authenticating user"
        wait_until(lambda: refused in server.log.read_text())
        boot.write_text("second\n")
        away.rename(keys)

    machine = threading.Thread(target=go_down_and_come_up)
    machine.start()
    try:
        device.reboot(timeout_s=200)
    finally:
        given_up.set()
        machine.join()
    assert device.boot_id() == "second"


def test_a_host_without_sftp(
    make_board: MakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, device = make_board()
    server.stop()
    config = (server.folder / "sshd_config").read_text()
    (tmp_path / "file").write_text("x")

    def push_with(subsystem: str) -> None:
        text = config.replace("Subsystem sftp internal-sftp", subsystem)
        with run_sshd(server, text), pytest.raises(DeviceUnsupportedError, match="offers no SFTP"):
            device.push(tmp_path / "file", f"{tmp_path}/remote")
        assert not (tmp_path / "remote").exists()

    for subsystem in ("", "Subsystem sftp /bin/echo Welcome to this board"):
        push_with(subsystem)
    push_with("Subsystem sftp /bin/false")
    begin = paramiko.Channel.invoke_subsystem

    def begin_and_end(channel: paramiko.Channel, name: str) -> None:
        begin(channel, name)
        wait_for(lambda: channel.closed)

    monkeypatch.setattr(paramiko.Channel, "invoke_subsystem", begin_and_end)
    push_with("Subsystem sftp /bin/false")


def test_a_file_that_becomes_shorter_is_not_whole(make_board: MakeBoard, tmp_path: Path) -> None:
    _, device = make_board()
    big = tmp_path / "big"
    big.write_bytes(os.urandom(10_000_000))
    with pytest.raises(DeviceTransferError, match="it ended after"):
        device.pull(str(big), tmp_path / "back", on_progress=lambda _: os.truncate(big, 300_000))
    assert not (tmp_path / "back").exists()


def test_a_pull_is_whole_with_any_size_of_answer(
    make_board: MakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSH answers a request of 1 MiB with 255 KiB, as older versions any with 64 KiB."""
    _, device = make_board()
    for request_bytes in (32 * 1024, 192 * 1024, 1 << 20):
        monkeypatch.setattr("plugins.ssh_devices.transport._REQUEST", request_bytes)
        for size in (0, 1, 192 * 1024, 5_000_001):
            (tmp_path / "file").write_bytes(os.urandom(size))
            assert device.pull(str(tmp_path / "file"), tmp_path / "back") == size
            assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
        device.pull("/proc/version", tmp_path / "back")  # its size is 0, as the kernel says
        assert (tmp_path / "back").read_text() == Path("/proc/version").read_text()


@contextlib.contextmanager
def run_sshd(server: SshServer, config: str) -> Iterator[None]:
    """The same server with another configuration."""
    file = server.folder / "other_config"
    file.write_text(config)
    sshd = program("sshd")
    process = subprocess.Popen([sshd, "-D", "-f", file], stderr=subprocess.DEVNULL)
    try:
        listens = False
        while not listens:
            assert process.poll() is None
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", server.port), 120).close()
                listens = True
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def test_many_keys_are_agreed_on_in_the_middle(make_board: MakeBoard, tmp_path: Path) -> None:
    server, device = make_board()
    server.stop()
    big, back = tmp_path / "big", tmp_path / "back"
    big.write_bytes(os.urandom(6_000_000))
    text = (server.folder / "sshd_config").read_text()
    with run_sshd(server, f"{text}RekeyLimit 1M\n"):
        device.push(big, f"{tmp_path}/remote")
        device.pull(f"{tmp_path}/remote", back)
        assert back.read_bytes() == big.read_bytes()
        digest = hashlib.sha256(big.read_bytes()).hexdigest()
        assert device.shell("sha256sum", stdin=big.read_bytes()).stdout.startswith(digest)


def test_start_files_of_the_shell_that_print(make_board: MakeBoard, tmp_path: Path) -> None:
    _, device = make_board(PATH="/usr/bin:/bin")
    (tmp_path / "ssh/home/.bashrc").write_text("printf 'Welcome\\nto this board '\n")
    (tmp_path / "ssh/home/.zshenv").write_text("echo Welcome\n")
    assert device.shell("echo out").stdout == "out\n"
    assert device.work_root.startswith(str(tmp_path / "ssh/home"))
