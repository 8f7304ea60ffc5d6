"""Finding the adb server, and starting one where none runs.

An adb server serves any client. One that we start therefore listens on a unix socket in a folder of
the user's own, unless the environment names a port.

A server that runs has its own owner, and other people's devices hang on it: it is used with any
version, never stopped and never replaced. So the `adb` program only starts servers: as a client it
would kill a server of another version. It is started as `adb server nodaemon`, under a lock, and
gives up where the port is taken already, so that of several processes that start one at the same
time exactly one wins.

A server sees all that goes to its devices, and can answer in their place: one that belongs neither
to this user nor to root is refused, unless the caller trusts its owner.
"""

import contextlib
import os
import platform
import re
import signal
import socket
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from buildlib.paths import default_cache_root
from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import Connection, ServerAddress, address_from, query
from harness.devices.base import FailReply, ServerUnreachable, StreamClosed
from harness.devices.socket_owner import server_owners, tcp_sockets, user_name
from harness.errors import AdbServerError, one_line
from harness.paths import make_state_dir, private_lock, state_dir

_VERSION = re.compile(r"[0-9A-Fa-f]{1,4}")
_VERSIONS = re.compile(r"Android Debug Bridge version 1\.0\.(\d{1,4})(?:\s+Version (\S+))?")
_TELLS_LOSS = 35
_PROBE_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 20.0
_POLL_S = 0.05
_MAX_SOCKET_PATH = 107
_ROOT = 0
_USB_BUS = Path("/dev/bus/usb")


def own_address() -> ServerAddress:
    """Return the address of the server that we start for this user: hosts may share homes."""
    return ServerAddress(path=str(state_dir().absolute() / "adb" / f"{platform.node()}.socket"))


def server_address() -> ServerAddress:
    """Return the address that the environment names; else that of a server that runs, or would run.

    A server of ours comes before another at adb's own port, because our devices hang on it.
    """
    address = address_from(os.environ)
    if address is not None:
        return address
    usual, own = ServerAddress(), own_address()
    return usual if not is_taken(own) and is_taken(usual) else own


def is_taken(address: ServerAddress) -> bool:
    """Return whether anything listens at an address."""
    try:
        address.connect(_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def resolve_server(
    address: ServerAddress | None = None, *, trusted_users: Collection[str] = ()
) -> AdbServer:
    """Return the adb server that runs at `address`, by default at `server_address()`.

    Args:
        trusted_users: accounts, by name or number, with servers to use beside ours and root's.

    Raises:
        AdbServerError: none runs there, something else does, or one of another user.
    """
    address = address or server_address()
    try:
        return _probe(address, trusted_users)
    except ServerUnreachable as error:
        raise AdbServerError(str(address), f"cannot be reached: {error}") from None


def ensure_server(
    address: ServerAddress | None = None, *, trusted_users: Collection[str] = ()
) -> AdbServer:
    """Return the adb server at `address`, started if it is on this host and does not run.

    Args:
        trusted_users: see `resolve_server`.

    Raises:
        AdbServerError: something else answers, one of another user does, or none could be started
            there.
    """
    address = address or server_address()
    try:
        return _probe(address, trusted_users)
    except ServerUnreachable as error:
        if not address.local:
            reason = f"cannot be reached, and is not on this host to be started: {error}"
            raise AdbServerError(str(address), reason) from None
    lock = private_lock(_prepare_file(address, "lock"), _START_TIMEOUT_S)
    try:
        with lock:
            try:
                return _probe(address, trusted_users)
            except ServerUnreachable:
                return _start(address, trusted_users)
    except Timeout:
        raise AdbServerError(str(address), "another process takes too long to start it") from None


@dataclass(frozen=True, slots=True)
class AdbProgram:
    """An `adb` on this host.

    Attributes:
        release: of the platform tools, such as `29.0.6-debian`.
        protocol: what its server and its client speak, 41 for adb 1.0.41; a client kills a server
            of another.
    """

    path: Path
    release: str
    protocol: int

    @property
    def tells_loss(self) -> bool:
        """True if its `adb shell` fails when the device goes away; older ones end with 0."""
        major = self.release.partition(".")[0]
        return major.isdecimal() and int(major) >= _TELLS_LOSS


def find_adb() -> Path:
    """Return the `adb` program: the user's on the PATH, else the one that comes with adbutils."""
    import adbutils

    try:
        return Path(adbutils.adb_path())
    except adbutils.AdbError as error:
        raise AdbServerError("(none)", f"no adb program: {error}") from None


def identify_adb(path: Path) -> AdbProgram:
    """Ask an `adb` program for its versions."""
    try:
        done = subprocess.run(
            [path, "version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AdbServerError("(none)", f"{path} does not run: {error}") from None
    match = _VERSIONS.match(done.stdout)
    if match is None:
        said = one_line(done.stderr or done.stdout, 200) or "nothing"
        raise AdbServerError("(none)", f"{path} is no adb: to `adb version` it says {said}")
    return AdbProgram(path, match[2] or f"1.0.{match[1]}", int(match[1]))


def _probe(address: ServerAddress, trusted_users: Collection[str]) -> AdbServer:
    """Return the running server; `ServerUnreachable` if nothing listens there."""
    try:
        with Connection(address, Deadline(_PROBE_TIMEOUT_S)) as connection:
            owner = _check_owner(connection.detach(), address, trusted_users)
            connection.request("host:version")
            answer = connection.receive_block()
        if _VERSION.fullmatch(answer):
            return AdbServer(address, int(answer, 16), owner=owner)
        reason = f"what listens there is no adb server: its version is {answer!r}"
    except (FailReply, StreamClosed) as error:
        reason = f"what listens there is no adb server: {error}"
    except DeadlineExceeded:
        reason = f"what listens there does not answer within {_PROBE_TIMEOUT_S:g} s"
    raise AdbServerError(str(address), reason)


def _check_owner(
    connection: socket.socket, address: ServerAddress, trusted_users: Collection[str]
) -> str:
    """Return the owner of a server, root or trusted: empty for this user, and if unknown."""
    others = sorted(server_owners(connection) - {os.geteuid()})
    for uid in others:
        name = user_name(uid)
        word = name.removeprefix("uid ")
        if uid != _ROOT and not {name, str(uid)} & set(trusted_users):
            reason = (
                f"it belongs to {name}, who could read what goes to its devices and forge their "
                f"answers: trust {name} by `adb_server: {{trusted_users: [{word}]}}` in pool.yaml, "
                f"or use one of your own: `export ADB_SERVER_SOCKET={own_address().spec}`"
            )
            raise AdbServerError(str(address), reason)
    return user_name(others[0]) if others else ""


def _prepare_file(address: ServerAddress, suffix: str) -> Path:
    folder = default_cache_root()
    folder.mkdir(parents=True, exist_ok=True)
    name = address.path.strip("/").replace("/", "-") or address.port
    return folder / f"adb-server-{name}.{suffix}"


def _prepare_socket(address: ServerAddress) -> None:
    """Make the folder of a socket, for this user alone."""
    path = Path(address.path)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        reason = f"a socket's path has at most {_MAX_SOCKET_PATH} bytes: "
        reason += "set a shorter QNNFARM_STATE_DIR, or ADB_SERVER_SOCKET"
        raise AdbServerError(str(address), reason)
    if address != own_address():
        return
    try:
        make_state_dir()
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.parent.chmod(0o700)  # fails if it is another user's
    except OSError as error:
        raise AdbServerError(str(address), f"its folder cannot be used: {error}") from None


def _start(address: ServerAddress, trusted_users: Collection[str]) -> AdbServer:
    """Start a server that outlives this process, and wait until one answers."""
    adb = find_adb()
    if address.path:
        _prepare_socket(address)
    log_path = _prepare_file(address, "log")
    spec = address.spec if address.path else f"tcp:localhost:{address.port}"
    pid = _spawn_detached([str(adb), "-L", spec, "server", "nodaemon"], log_path)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        ours = os.waitpid(pid, os.WNOHANG)[0] == 0
        try:
            server = _probe(address, trusted_users)
        except ServerUnreachable:
            if not ours:
                break
            time.sleep(_POLL_S)
            continue
        # Ours may be about to give up against one that someone else started meanwhile.
        while ours and not _listens(pid, address) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            ours = os.waitpid(pid, os.WNOHANG)[0] == 0
        return replace(server, started_by_us=True, adb_path=adb) if ours else server
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    reason = f"{adb} does not start; its log {log_path} ends with: {_tail(log_path)}"
    raise AdbServerError(str(address), reason)


def _spawn_detached(command: list[str], log_path: Path) -> int:
    """Start a server in a session of its own, with nothing of ours open; gives its pid."""
    # `subprocess` would warn when its object goes while the program runs on, as this one shall.
    # What a caller has handed us, such as the lock of a `flock` around us, would stay held.
    inherited = [int(file.name) for file in Path("/proc/self/fd").iterdir() if int(file.name) > 2]
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    # A server waits three seconds for the first look of libusb, which does not come where there is
    # no bus, as in a container; its own code looks there, too, and finds a bus that comes later.
    usb = {} if _USB_BUS.exists() else {"ADB_LIBUSB": "0"}
    return os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", 'cd / && exec "$@"', "sh", *command],
        usb | os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log_path), log_flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, number) for number in inherited),
        ],
        setsid=True,
    )


def _listens(pid: int, address: ServerAddress) -> bool:
    """Return whether a process of ours listens on `address`, by the kernel's own tables."""
    # A table read while sockets come and go may lack lines: a `False` is worth asking again.
    sockets = set()
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since
                sockets.add(str(file.readlink()))
        if address.path:
            rows = (line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines())
            # Columns: number, references, protocol, flags, type, state, inode, path.
            inodes = {row[6] for row in rows if row[7:] == [address.path]}
        else:
            at_port = f":{address.port:04X}"
            listening = (row for row in tcp_sockets(pid) if row.listens)
            inodes = {row.inode for row in listening if row.local.endswith(at_port)}
    except OSError:
        return False
    return any(f"socket:[{inode}]" in sockets for inode in inodes)


def _tail(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "(nothing)"


def stop_if_ours(server: AdbServer) -> bool:
    """Stop a server that this process started, unless devices hang on it; gives whether it did."""
    if not server.started_by_us:
        return False
    try:
        if server.devices():
            return False
        query(server.address, "host:kill", Deadline(_PROBE_TIMEOUT_S))
    except StreamClosed:
        return True  # it ends without more of an answer
    except (AdbServerError, FailReply, ServerUnreachable, DeadlineExceeded):
        return False
    return True
