"""Ways out of a device, all tried on a device of root's and on one of a user without privileges.

On the host, a victim (the user who started the device) has what a way out would reach: files with a
secret, sockets, a FIFO, a terminal, a process. A way prints `OPEN` if it finds an opening.
"""

import contextlib
import ctypes
import io
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.clock import Deadline
from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import Connection, open_service
from harness.devices.adb.transport import SyncSession
from harness.devices.base import FailReply
from plugins.virtual_android import manager
from plugins.virtual_android.namespace import FORCE_VARIABLE, NamespaceKind
from tests.plugins.virtual_android.helpers import Adb
from tests.system import IMPORT_PATH, NOBODY, as_user, needs, python_for_others
from tests.waiting import PATIENCE_S

SECRET = f"secret-{secrets.token_hex(8)}"
ABSTRACT = f"qnnfarm-{secrets.token_hex(8)}"
SHARED_MEMORY = secrets.randbelow(1 << 30) + 1


@dataclass(frozen=True)
class Victim:
    """A user of the host with a device.

    Attributes:
        folder: theirs alone, with `home` and `state` in it.
        pid: of a process of theirs.
        terminal: of theirs, a path below `/dev/pts`.
        port: on the loopback, at which something of theirs listens, as an adb server does.
    """

    uid: int
    folder: Path
    pid: int
    terminal: str
    port: int
    serial: str

    @property
    def file(self) -> Path:
        return self.folder / "home" / "file"

    @property
    def socket(self) -> Path:
        return self.folder / "home" / "socket"

    @property
    def state(self) -> Path:
        return self.folder / "state" / "devices" / "escape"


@pytest.fixture(scope="module", params=["root", "user"])
def victim(
    request: pytest.FixtureRequest, adb_server: AdbServer, adb_environment: Path
) -> Iterator[Victim]:
    """A device of root's, and one of a user without privileges."""
    uid = os.geteuid() if request.param == "root" or os.geteuid() else NOBODY
    if request.param == "root":
        needs("root", "namespaces")
    elif os.geteuid() == 0:
        needs("user-namespaces", "second-user")
    else:
        needs("user-namespaces")
    kind = NamespaceKind.USER if uid else NamespaceKind.ROOT
    with contextlib.ExitStack() as at_end:
        folder = Path(tempfile.mkdtemp(prefix="qnnfarm-victim-"))
        at_end.callback(shutil.rmtree, folder)
        key = folder / "key.pub"
        shutil.copy(adb_environment / ".android" / "adbkey.pub", key)
        (folder / "home").mkdir(mode=0o700)
        (folder / "home" / "file").write_text(SECRET)
        os.mkfifo(folder / "home" / "fifo")
        at_end.enter_context(_listening(folder / "home" / "socket"))
        at_end.enter_context(_listening(f"\0{ABSTRACT}"))
        port = at_end.enter_context(_listening_on_loopback())
        terminal = at_end.enter_context(_terminal(uid))
        at_end.enter_context(_shared_memory())
        for path in (folder, folder / "home", *(folder / "home").iterdir()):
            os.chown(path, uid, uid if uid == NOBODY else -1)
        variables = {
            "HOME": str(folder / "home"),
            "QNNFARM_STATE_DIR": str(folder / "state"),
            "ADB_VENDOR_KEYS": str(key.with_suffix("")),
            "SECRET": SECRET,
            FORCE_VARIABLE: "auto",
        }
        command, environment = _as_user(uid, variables)
        sleeper = at_end.enter_context(subprocess.Popen([*command, "sleep", "1000"]))
        at_end.callback(sleeper.kill)

        def run_python(code: str) -> str:
            done = subprocess.run(
                [*command, *_python(uid), "-P", "-c", code],
                env=environment,
                cwd="/",
                stdout=subprocess.PIPE,
                timeout=PATIENCE_S,
                check=False,
            )
            return done.stdout.decode()

        at_end.callback(run_python, _REMOVE)
        serial, found = run_python(_START).split()
        assert found == kind
        adb_server.connect(serial)
        at_end.callback(adb_server.disconnect, serial)
        yield Victim(uid, folder, sleeper.pid, terminal, port, serial)


_START = """
from plugins.virtual_android import manager
device = manager.start("escape", "SM8750")
print(device.serial, device.namespace)
"""
_REMOVE = "from plugins.virtual_android import manager; manager.remove('escape')"


def _python(uid: int) -> list[str]:
    return [sys.executable if uid == os.geteuid() else str(python_for_others())]


def _as_user(uid: int, variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What to put before a command so that the user runs it, and the environment for it."""
    environment = {**os.environ, **variables}
    if uid == os.geteuid():
        return [], environment
    environment["PYTHONPATH"] = IMPORT_PATH
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return as_user(uid), environment


@contextlib.contextmanager
def _listening(address: Path | str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        yield


@contextlib.contextmanager
def _listening_on_loopback() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def _terminal(uid: int) -> Iterator[str]:
    master, slave = os.openpty()
    path = os.ttyname(slave)
    os.chown(path, uid, -1)
    yield path
    os.close(master)
    os.close(slave)


@contextlib.contextmanager
def _shared_memory() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    ident = libc.shmget(SHARED_MEMORY, 4096, 0o1666)
    yield
    libc.shmctl(ident, 0, None)


# Commands of the device's shell. `{file}` and the like are the victim's.

_READS = {
    "an absolute path": "cat {file}",
    "a symbolic link": "ln -sf {file} $TMPDIR/l; cat $TMPDIR/l",
    "the root of a process": "for p in /proc/[0-9]*; do cat $p/root{file} $p/cwd{file}; done",
    "the root of the first process": "cat /proc/1/root{file} /proc/1/cwd{file}",
    "environment of processes": "cat /proc/[0-9]*/environ /proc/1/environ",
    "the home folder": "cat {home}/fil* ~/../*/file",
}
_OPENS = {
    "the state folder": "test -e {state} && echo OPEN",
    "the host's temporary files": "test -e {folder} && echo OPEN",
    "a file written by its path": "echo x >{file} && echo OPEN",
    "a FIFO of the host": "test -p {home}/fifo && echo OPEN",
    "programs of the host": (
        "for d in / /etc /dev /usr /usr/bin /usr/lib /bin /lib /proc /sys/devices/system; do"
        " if touch $d/qnnfarm-escape; then rm $d/qnnfarm-escape; echo OPEN; fi; done"
    ),
    "a terminal of the host": "test -e {terminal} && echo OPEN",
    "disks and other nodes": (
        "for n in $(cd /dev && ls); do case $n in fd | full | null | ptmx | pts | random | shm |"
        " std* | tty | urandom | zero) ;; *) echo OPEN $n ;; esac; done"
    ),
    "kernel settings": (
        "for f in kernel/core_pattern kernel/hostname vm/overcommit_memory; do"
        " read -r v </proc/sys/$f && echo $v >/proc/sys/$f && echo OPEN; done"
    ),
    "a signal": "kill -0 {pid} && echo OPEN; kill -CONT {pid} && echo OPEN",
    "the host's name": "hostname escaped && echo OPEN",
    "the clock": "date -s @$(date +%s) >/dev/null && echo OPEN",
    "a remount": "mount -o remount,rw,bind /usr && echo OPEN",
    "a remount as root of a user namespace": (
        "unshare -Urm sh -c 'mount -o remount,rw,bind /usr' && echo OPEN;"
        " unshare -Urm sh -c 'mount -o remount,suid,dev,bind /data' && echo OPEN"
    ),
    "another /proc": "unshare -Urmpf sh -c 'mount -t proc proc /proc' && echo OPEN",
    "capabilities": (
        "while read -r k v; do case $k in Cap*) [ $((0x$v)) = 0 ] || echo OPEN ;;"
        " NoNewPrivs:) [ $v = 1 ] || echo OPEN ;; esac; done </proc/self/status"
    ),
    "being root": "[ $(id -u) != 0 ] || echo OPEN; [ $(id -G) = $(id -g) ] || echo OPEN",
}
_PRELUDE = '''
import ctypes, os, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def tell(holds):
    if holds: print("OPEN")
def others():
    """The first process and its threads, and the victim's process."""
    try: threads = [int(name) for name in os.listdir("/proc/1/task")]
    except OSError: threads = [1]
    return [*threads, {pid}]
def as_root_of_a_namespace():
    if libc.unshare(0x10000000 | 0x20000) == 0:
        for name, text in ("uid_map", f"0 {os.getuid()} 1"), ("setgroups", "deny"):
            try: open(f"/proc/self/{name}", "w").write(text)
            except OSError: pass
'''
_FORKS = """
for name, program in WAYS.items():
    print(f"\\n[{name}]")
    if os.fork() == 0:
        try: exec(program)
        except OSError: pass
        except Exception as error: print("OPEN?", repr(error))
        os._exit(0)
    os.wait()
"""
_PROGRAMS = {
    "a break out of chroot": """
as_root_of_a_namespace()
os.chdir(os.environ["TMPDIR"])
os.makedirs("jail", exist_ok=True)
for _ in range(2):
    if libc.chroot(b"jail") == 0:
        os.chdir("../../../../../../../..")
        libc.chroot(b".")
        tell(os.path.exists("{file}"))
""",
    "a node of the host's disk": """
as_root_of_a_namespace()
for name in (os.environ["TMPDIR"] + "/disk", "/dev/shm/disk"):
    os.mknod(name, 0o600 | stat.S_IFBLK, {disk})
    tell(os.read(os.open(name, os.O_RDONLY), 16))
""",
    "tracing of the first process": """
for one in others():
    if libc.ptrace(16, one, None, None) == 0:
        tell(True)
        libc.ptrace(17, one, None, None)
""",
    "a socket of the host": """
s = socket.socket(socket.AF_UNIX)
s.connect("{unix}")
tell(True)
""",
    "an abstract socket of the host": """
s = socket.socket(socket.AF_UNIX)
s.connect("\\0{abstract}")
tell(True)
""",
    "a port of the host": """
s = socket.create_connection(("127.0.0.1", {port}), timeout=5)
tell(True)
""",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); tell(True)",
    "shared memory": "tell(libc.shmget({shared_memory}, 0, 0) >= 0)",
    "a file by its handle": """
handle = (ctypes.c_ubyte * 128)()
ctypes.c_uint.from_buffer(handle).value = 120
mount = ctypes.c_int()
if libc.name_to_handle_at(-100, b"/data", handle, ctypes.byref(mount), 0) == 0:
    there = os.open("/data", os.O_RDONLY)
    tell(libc.open_by_handle_at(there, handle, 0) >= 0)
""",
}


def test_commands_find_no_way_out(victim: Victim, adb: Adb) -> None:
    ways = {name: _filled(victim, text) for name, text in (_READS | _OPENS).items()}
    heads = {name: f"printf '\\n[%s]\\n' {shlex.quote(name)}" for name in ways}
    tries = "\n".join(f"{heads[name]}; ({way}) </dev/null 2>&1" for name, way in ways.items())
    _assert_shut(victim, adb("-s", victim.serial, "shell", tries), ways)


def test_programs_find_no_way_out(victim: Victim, adb: Adb, tmp_path: Path) -> None:
    ways = {name: _filled(victim, text) for name, text in _PROGRAMS.items()}
    script = _filled(victim, _PRELUDE) + _FORKS.replace("WAYS", repr(ways))
    (tmp_path / "ways.py").write_text(script)
    adb("-s", victim.serial, "push", tmp_path / "ways.py", "/data/local/tmp/ways.py")
    done = adb("-s", victim.serial, "shell", "python3 -u $TMPDIR/ways.py </dev/null 2>&1")
    _assert_shut(victim, done, ways)


def _filled(victim: Victim, text: str) -> str:
    facts = {
        "abstract": ABSTRACT,
        "disk": Path("/").stat().st_dev,
        "file": victim.file,
        "folder": victim.folder,
        "home": victim.folder / "home",
        "pid": victim.pid,
        "port": victim.port,
        "shared_memory": SHARED_MEMORY,
        "unix": victim.socket,
        "state": victim.state,
        "terminal": victim.terminal,
    }
    for name, value in facts.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _assert_shut(
    victim: Victim, done: "subprocess.CompletedProcess[bytes]", ways: Collection[str]
) -> None:
    """Check the output of all ways, each behind its name, and what the victim has left."""
    outputs = re.split(r"^\[(.+)\]\n", done.stdout.decode(errors="replace"), flags=re.MULTILINE)
    found = dict(zip(outputs[1::2], outputs[2::2], strict=True))
    assert found.keys() == set(ways), done
    assert {name: out for name, out in found.items() if "OPEN" in out or SECRET in out} == {}
    _assert_spared(victim)


def _assert_spared(victim: Victim) -> None:
    assert victim.file.read_text() == SECRET
    assert {path.name for path in (victim.folder / "home").iterdir()} <= {
        *("file", "fifo", "socket", ".cache", ".local")
    }


# The sync service, which the device's own process serves


_PATHS = (
    *("{file}", "/data/local/tmp/way/file", "/proc/self/root{file}", "/proc/self/environ"),
    *(f"/proc/self/fd/{n}/../../../../../../../../..{{file}}" for n in range(3, 6)),
)


def test_transfers_find_no_way_out(victim: Victim, adb: Adb, adb_server: AdbServer) -> None:
    folder = victim.folder / "home"
    adb("-s", victim.serial, "shell", f"ln -sfn {folder} /data/local/tmp/way")
    for way in _PATHS:
        path, pulled = _filled(victim, way), io.BytesIO()
        with _sync(adb_server, victim) as (session, _), contextlib.suppress(FailReply):
            session.receive_many([path], [contextlib.nullcontext(pulled)])
        assert SECRET.encode() not in pulled.getvalue(), way
        with _sync(adb_server, victim) as (session, _), tempfile.TemporaryFile() as pushed:
            pushed.write(b"pushed")
            pushed.flush()
            with contextlib.suppress(FailReply):
                session.send(pushed, path, mode=0o644, mtime=1)
                session.finish()
        _assert_spared(victim)
        if "{file}" in way:
            with _sync(adb_server, victim) as (session, connection):
                # The device may have got a file of its own there: a push makes the folders above.
                if session.stat(path) is not None:
                    session.receive_many([path], [contextlib.nullcontext(own := io.BytesIO())])
                    assert own.getvalue() == b"pushed", way
                assert b"socket" not in _listed(connection, str(Path(path).parent)), way


@contextlib.contextmanager
def _sync(server: AdbServer, victim: Victim) -> Iterator[tuple[SyncSession, Connection]]:
    with open_service(server.address, victim.serial, "sync:", Deadline(60)) as connection:
        yield SyncSession(connection), connection


def _listed(connection: Connection, path: str) -> bytes:
    data = path.encode()
    connection.send(b"LIST" + len(data).to_bytes(4, "little") + data)
    names = b""
    while (entry := connection.receive(20))[:4] == b"DENT":
        names += connection.receive(int.from_bytes(entry[16:20], "little")) + b"\n"
    return names


def test_forwards_find_no_way_out(victim: Victim, adb: Adb) -> None:
    for way in ("localfilesystem:{unix}", "localabstract:{abstract}", "tcp:{port}"):
        port = int(adb("-s", victim.serial, "forward", "tcp:0", _filled(victim, way)).stdout)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            assert client.recv(1) == b"", way  # it is closed, as nobody listens there
        adb("-s", victim.serial, "forward", "--remove", f"tcp:{port}")


def test_programs_run_on_a_terminal_among_few_processes(victim: Victim, adb: Adb) -> None:
    script = "tty; python3 -c 'print(6 * 7)'; ps -A | wc -l"
    output = adb("-s", victim.serial, "shell", "-tt", script).stdout
    assert output.startswith(b"/dev/pts/")
    assert b"42" in output
    assert int(output.split()[-1]) < 10


@pytest.mark.needs("root")
def test_a_program_with_the_setuid_bit_gains_nothing(victim: Victim, adb: Adb) -> None:
    """Another's program on the device's disk, which that user may run."""
    there = victim.state / "root" / "data" / "local" / "tmp" / "setuid"
    shutil.copy("/usr/bin/id", there)
    os.chown(there, 0 if victim.uid else NOBODY, 0)
    there.chmod(stat.S_ISUID | 0o755)
    own = adb("-s", victim.serial, "shell", "id -u").stdout
    assert adb("-s", victim.serial, "shell", "$TMPDIR/setuid -u").stdout == own


@pytest.mark.needs("namespaces")
def test_a_link_left_behind_leads_nowhere_at_the_next_start(
    start_device: Callable[..., manager.VirtualDevice], adb: Adb, tmp_path: Path
) -> None:
    device = start_device("planted")
    (tmp_path / "file").write_text(SECRET)
    adb(
        *("-s", device.serial, "shell"),
        f"cd /.device && rm -r sdcard boot_id && ln -s {tmp_path} sdcard &&"
        f" ln -s {tmp_path}/file boot_id",
    )
    manager.stop("planted")
    device = start_device("planted")
    adb("-s", device.serial, "wait-for-device")
    done = adb("-s", device.serial, "shell", "cat /sdcard/file /proc/sys/kernel/random/boot_id")
    assert SECRET.encode() not in done.stdout
    assert done.stdout.count(b"-") == 4
    assert (tmp_path / "file").read_text() == SECRET
    manager.remove("planted")
