"""Finding, starting and sparing adb servers, with the real program."""

import os
import socket
import socketserver
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness.clock import Deadline
from harness.devices.adb import server as module
from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import ServerAddress, query
from harness.devices.adb.server import (
    ensure_server,
    find_adb,
    identify_adb,
    resolve_server,
    stop_if_ours,
)
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.errors import (
    AdbServerError,
    DeviceConnectError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
)
from harness.paths import private_lock
from harness.pool.pool import host_devices
from tests.command_line import Started
from tests.conftest import kill_server
from tests.system import NOBODY, as_user, python_for_others


@contextmanager
def _listener(answers: dict[str, bytes]) -> Iterator[tuple[ServerAddress, list[str]]]:
    """Something that listens as an adb server does; gives its address and what it was asked."""
    asked: list[str] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            length = self.request.recv(4)
            if not length:  # who only looks whether something listens here
                return
            asked.append(self.request.recv(int(length, 16)).decode())
            answer = answers.get(asked[-1])
            if answer is None:
                self.request.recv(1)  # nothing, until who asked goes
            else:
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield ServerAddress("127.0.0.1", listener.server_address[1]), asked
        finally:
            listener.shutdown()
            thread.join()


def test_a_running_server_is_used_as_it_is(adb_server: AdbServer) -> None:
    assert adb_server.started_by_us
    assert adb_server.adb_path is not None
    assert adb_server.adb_path.name == "adb"
    again = ensure_server()
    assert again.started_by_us is False
    assert (again.address, again.version) == (adb_server.address, 41)
    assert resolve_server() == again


@pytest.mark.parametrize(
    ("bus", "own", "told"), [("none", None, ["0"]), ("", None, []), ("none", "1", ["1"])]
)
def test_libusb_looks_for_no_devices_where_there_is_no_bus(
    bus: str, own: str | None, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would wait three seconds for it; who sets the variable decides."""
    monkeypatch.setattr(module, "_USB_BUS", tmp_path / bus)
    if own is not None:
        monkeypatch.setenv("ADB_LIBUSB", own)
    os.waitpid(module._spawn_detached(["env"], tmp_path / "log"), 0)
    lines = (tmp_path / "log").read_text().splitlines()
    variables = dict(line.partition("=")[::2] for line in lines)
    assert [value for name, value in variables.items() if name == "ADB_LIBUSB"] == told


def test_a_server_of_another_version_is_left_alone() -> None:
    with _listener({"host:version": b"OKAY0004001f", "host:devices-l": b"OKAY0000"}) as (at, asked):
        server = ensure_server(at)
        assert server.version == 31
        assert server.devices() == []
    assert asked == ["host:version", "host:devices-l"]


def test_many_processes_start_one_server(
    adb_environment: Path, new_port: Callable[[], int]
) -> None:
    at = ServerAddress("127.0.0.1", new_port())
    code = (
        "from harness.devices.adb.server import ensure_server;"
        "from harness.devices.adb.connection import *;"
        f"print(ensure_server(ServerAddress('127.0.0.1', {at.port})).started_by_us)"
    )
    processes = [Started("-c", code) for _ in range(3)]
    try:
        # Were a starter's stdout inherited by the server, this would never end.
        outputs = [process.communicate(timeout=200)[0].strip() for process in processes]
    finally:
        query(at, "host:version", Deadline(60))
        with pytest.raises(Exception):  # noqa: B017 - it may close before it answers
            query(at, "host:kill", Deadline(60))
    assert sorted(outputs) == ["False", "False", "True"]


def test_a_server_holds_nothing_that_its_starter_was_handed(
    adb_environment: Path, free_adb_port: int
) -> None:
    """As the lock of `flock FILE qnnfarm ...`, which would never be free again."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    ensure_server(ServerAddress("127.0.0.1", free_adb_port))
    os.close(write)
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # raises while somebody could still write
    os.close(read)


def test_only_an_own_server_without_devices_is_stopped(
    adb_environment: Path,
    adb_server: AdbServer,
    virtual_device: Device,
    new_port: Callable[[], int],
) -> None:
    at = ServerAddress("127.0.0.1", new_port())
    own = ensure_server(at)
    assert own.started_by_us
    assert stop_if_ours(ensure_server(at)) is False
    assert virtual_device.serial in {entry.serial for entry in adb_server.devices()}
    assert stop_if_ours(adb_server) is False
    assert stop_if_ours(own) is True
    with pytest.raises(AdbServerError, match="cannot be reached"):
        resolve_server(at)


def test_a_server_of_ours_is_known_as_ours_when_the_tables_are_late(
    adb_environment: Path, monkeypatch: pytest.MonkeyPatch, new_port: Callable[[], int]
) -> None:
    answers = [False, False]
    listens = module._listens
    monkeypatch.setattr(
        module, "_listens", lambda *args: answers.pop() if answers else listens(*args)
    )
    own = ensure_server(ServerAddress("127.0.0.1", new_port()))
    assert own.started_by_us
    assert stop_if_ours(own)


def test_a_remote_server_is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_start", lambda _: pytest.fail("started"))
    monkeypatch.setenv("ADB_SERVER_SOCKET", "tcp:remote.invalid:5037")
    with pytest.raises(AdbServerError, match=r"remote\.invalid:5037.*not on this host"):
        ensure_server()
    with pytest.raises(AdbServerError, match="cannot be reached"):
        resolve_server()


def test_a_process_that_is_no_adb_server_is_named() -> None:
    with (
        _listener({"host:version": b"HTTP/1.1 400 Bad Request\r\n\r\n"}) as (at, _),
        pytest.raises(AdbServerError, match=f"127.0.0.1:{at.port}.*no adb server"),
    ):
        ensure_server(at)


def test_a_server_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBE_TIMEOUT_S", 0.2)
    with _listener({}) as (at, _), pytest.raises(AdbServerError, match=r"not answer within 0\.2 s"):
        ensure_server(at)


def test_an_adb_that_does_not_start_is_reported_with_its_log(
    adb_environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_port: Callable[[], int],
) -> None:
    adb = tmp_path / "adb"
    adb.write_text("#!/bin/sh\n[ $1 = version ] || echo 'no usb for you' >&2\n")
    adb.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 3600.0)  # it is not what ends the wait
    with pytest.raises(AdbServerError, match=f"{adb} does not start.*no usb for you"):
        ensure_server(ServerAddress("127.0.0.1", new_port()))


@pytest.mark.parametrize("serial", ["127.0.0.1:1", "bad host:xx", "nowhere.invalid:5555"])
def test_connecting_to_nothing(adb_server: AdbServer, serial: str) -> None:
    with pytest.raises(DeviceConnectError) as caught:
        adb_server.connect(serial, timeout_s=200)  # asking for a name may take long
    assert caught.value.serial == serial
    assert adb_server.disconnect(serial) is False


def test_connecting_to_something_that_is_silent(adb_server: AdbServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        serial = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises((DeviceTimeoutError, DeviceConnectError)):
            adb_server.connect(serial, timeout_s=0.5)
        adb_server.disconnect(serial)


def test_the_answers_of_a_server_become_errors() -> None:
    def text(answer: str) -> bytes:
        return b"OKAY%04x%s" % (len(answer), answer.encode())

    answers = {
        "host:connect:a:1": text("failed to authenticate to a:1"),
        "host:connect:b:1": text("connected to b:1"),
        "host-serial:b:1:get-state": b"FAIL0013device unauthorized",
        "host:connect:c:1": text("connected to c:1"),
        "host-serial:c:1:get-state": text("device"),
    }
    with _listener(answers) as (at, _):
        server = AdbServer(at, 41)
        for serial in ("a:1", "b:1"):
            with pytest.raises(DeviceUnauthorizedError):
                server.connect(serial)
        server.connect("c:1")


def test_a_server_that_went_away() -> None:
    with socket.socket() as nobody:  # which keeps the port, so that nobody else gets it
        nobody.bind(("127.0.0.1", 0))
        server = AdbServer(ServerAddress(port=nobody.getsockname()[1]), 41)
        with pytest.raises(AdbServerError, match="went away"):
            server.connect("c:1")


# Servers of other users

_FOREIGN_SERVER = """
import os, socket, sys
family = socket.AF_UNIX if sys.argv[1].startswith("/") else socket.AF_INET
server = socket.socket(family)
server.bind(sys.argv[1] if family == socket.AF_UNIX else (sys.argv[1], 0))
if family == socket.AF_UNIX:
    os.chmod(sys.argv[1], 0o777)
server.listen()
print(server.getsockname()[1] if family == socket.AF_INET else 0, flush=True)
while True:
    client = server.accept()[0]
    if sys.argv[2:] == ["hides"]:
        server.close()
    print(client.recv(100), flush=True)
    client.sendall(b"OKAY00040029")
    client.close()
"""


@contextmanager
def _foreign_server(*words: str) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    command = [*as_user(NOBODY), str(python_for_others()), "-I", "-c", _FOREIGN_SERVER, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


@pytest.mark.needs("second-user")
@pytest.mark.parametrize("words", [("127.0.0.1",), ("0.0.0.0",), ("127.0.0.1", "hides")])  # noqa: S104
def test_a_server_of_another_user_is_refused_before_it_is_asked(words: tuple[str, ...]) -> None:
    with _foreign_server(*words) as (port, process):
        for use in (ensure_server, resolve_server):
            with pytest.raises(AdbServerError, match=r"belongs to nobody.*trusted_users"):
                use(ServerAddress(port=port))
            if words[1:]:
                break
        assert process.stdout is not None
        assert process.stdout.readline() == "b''\n"


@pytest.mark.needs("second-user")
def test_a_socket_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        path = f"{folder}/socket"
        with (
            _foreign_server(path),
            pytest.raises(AdbServerError, match="belongs to nobody"),
        ):
            ensure_server(ServerAddress(path=path))


@pytest.mark.needs("second-user")
def test_a_pool_file_says_whom_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pool.yaml"
    monkeypatch.setenv("QNNFARM_POOL", str(file))
    with _foreign_server("127.0.0.1") as (port, _):
        monkeypatch.setenv("ADB_SERVER_SOCKET", f"tcp:127.0.0.1:{port}")
        file.write_text(f"adb_server: {{trusted_users: [{NOBODY}]}}\n")
        with host_devices() as devices:
            server = devices.adb_server()
        assert (server.version, server.owner) == (41, "nobody")
        assert "nobody" in str(server.unauthorized("R58N123"))
        file.write_text("adb_server: {ours: false}\n")
        with host_devices() as devices, pytest.raises(AdbServerError, match="belongs to nobody"):
            devices.adb_server()


# A server of the user's own, on a unix socket


@pytest.fixture
def own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_port: Callable[[], int]
) -> Iterator[AdbServer]:
    """A server that is started where the environment names none, beside an idle usual port."""
    for name in ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_PORT", "ANDROID_ADB_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    usual = ServerAddress(port=new_port())
    monkeypatch.setattr(module, "ServerAddress", partial(ServerAddress, port=usual.port))
    with tempfile.TemporaryDirectory(prefix="qnnfarm-own-") as folder:  # a short path
        Path(folder).chmod(0o755)
        monkeypatch.setenv("QNNFARM_STATE_DIR", folder)
        server = ensure_server()
        yield server
        kill_server(server.address)


def test_a_server_that_we_start_is_the_users_alone(
    own_server: AdbServer, virtual_device: Device
) -> None:
    path = Path(own_server.address.path)
    assert own_server.started_by_us
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.is_socket()
    assert ensure_server() == replace(own_server, started_by_us=False, adb_path=None)
    own_server.connect(virtual_device.serial)
    assert (
        Device(AdbTransport(own_server, virtual_device.serial)).shell("echo here").stdout
        == "here\n"
    )
    assert own_server.adb_path is not None
    adb = [str(own_server.adb_path), "devices"]
    environment = {**os.environ, "ADB_SERVER_SOCKET": own_server.address.spec}
    listed = subprocess.run(adb, env=environment, capture_output=True, text=True, check=True)
    assert f"{virtual_device.serial}\tdevice" in listed.stdout
    own_server.disconnect(virtual_device.serial)


def test_a_server_at_the_usual_port_is_used_unless_ours_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADB_SERVER_SOCKET", raising=False)
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    with _listener({"host:version": b"OKAY00040029"}) as (usual, _):
        monkeypatch.setattr(module, "ServerAddress", partial(ServerAddress, port=usual.port))
        assert ensure_server().address == usual
        own = tmp_path / "own"
        monkeypatch.setattr(module, "own_address", lambda: ServerAddress(path=str(own)))
        with socket.socket(socket.AF_UNIX) as ours:
            ours.bind(str(own))
            assert module.server_address() == usual  # it is left behind by a server that ended
            ours.listen()
            assert module.server_address() == ServerAddress(path=str(own))


@pytest.mark.parametrize(
    ("release", "protocol", "tells"),
    [
        ("1.0.39", 39, False), ("29.0.6-debian", 41, False), ("34.0.5-10900879", 41, False),
        ("35.0.2-12147458", 41, True),
    ],
)  # fmt: skip
def test_a_program_is_asked_for_its_versions(
    tmp_path: Path, release: str, protocol: int, tells: bool
) -> None:
    second = f"Version {release}" if protocol > 39 else "Revision 3db08f2c6889-android"
    path = tmp_path / "adb"
    path.write_text(f"#!/bin/sh\necho Android Debug Bridge version 1.0.{protocol}\necho {second}")
    path.chmod(0o755)
    program = identify_adb(path)
    assert (program.release, program.protocol, program.tells_loss) == (release, protocol, tells)


def test_a_program_that_is_no_adb_is_named(tmp_path: Path) -> None:
    path = tmp_path / "adb"
    path.write_text("#!/bin/sh\necho no such bridge >&2; exit 1")
    path.chmod(0o755)
    with pytest.raises(AdbServerError, match=f"{path} is no adb: .*no such bridge"):
        identify_adb(path)
    path.chmod(0o644)
    with pytest.raises(AdbServerError, match=f"{path} does not run: "):
        identify_adb(path)


def test_a_server_tells_the_version_of_its_program(adb_server: AdbServer) -> None:
    program = identify_adb(find_adb())
    assert program.protocol == adb_server.version
    told = adb_server.release()
    assert told == (program.release.partition("-")[0] if program.tells_loss else "")
    status = b"\x08\x02\x18\x02*\x0635.0.22\x0812147458"  # of 35.0.2, the build behind it
    with _listener({"host:server-status": b"OKAY%04x%s" % (len(status), status)}) as (address, _):
        assert AdbServer(address, 41).release() == "35.0.2"
    with _listener({"host:server-status": b"OKAY0000"}) as (address, _):
        assert AdbServer(address, 41).release() == ""


def test_a_socket_in_a_folder_of_anothers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    (tmp_path / "adb").touch()
    with pytest.raises(AdbServerError, match="its folder cannot be used"):
        ensure_server(module.own_address())
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / ("d" * 100)))
    with pytest.raises(AdbServerError, match="shorter QNNFARM_STATE_DIR"):
        ensure_server(module.own_address())


@pytest.mark.parametrize("mode", [None, 0o644])
def test_nobody_else_can_hold_the_lock_of_a_start(tmp_path: Path, mode: int | None) -> None:
    """Whoever may read a file may lock it, and then the start would wait."""
    path = tmp_path / "adb-server.lock"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    with private_lock(path, 1):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
