"""Confinement of a device: its own files, processes, network and user, and nothing of the host's.

Inside, `/` is a new folder. `/data`, `/sdcard` and `/system` are the device's own. Of the host it
has, read-only, the files that programs need: `/usr` and its like, the Python interpreter, a few
files of `/etc`, and the description of the CPUs. All else is absent: homes, `/tmp`, `/run`, disks,
the state folder. Its processes are those of a PID namespace of its own, its network is a loopback
of its own, and its user has no capability and can gain none. The kernel grants this to root; to
others it does so within a user namespace.

As a program, `python -m plugins.virtual_android.namespace KIND FOLDER` confines itself and exits 0,
or prints the error.
"""

import contextlib
import errno
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from plugins.virtual_android import linux
from plugins.virtual_android.filesystem import DEVICE_FOLDERS, NAMESPACE_ROOT

FORCE_VARIABLE = "QNNFARM_VIRTUAL_NAMESPACE"
"""Environment variable that forces a kind: `root`, `user`, `none`, or `auto`."""
SHELL_UID = 2000
"""Android's user `shell`."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIMEOUT_S = 20.0
_SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "nix", "sbin", "usr")
"""Top-level entries of the host with its programs and libraries."""
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_CPUS = "/sys/devices/system"
_NODES = ("full", "null", "random", "tty", "urandom", "zero")
_DEV_LINKS = {
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    "stderr": "/proc/self/fd/2",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
}
_HARMLESS = linux.MS_NOSUID | linux.MS_NODEV
_MOUNT_FLAGS = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
"""Flags that statvfs(2) reports by the same bits."""
_MAX_MESSAGE = 4096


class NamespaceKind(StrEnum):
    """Kind of namespace that confines a device."""

    ROOT = "root"
    """Namespaces made with the privileges of root, who then becomes another user."""
    USER = "user"
    """Namespaces within a user namespace, which needs no privileges."""
    NONE = "none"
    """Unconfined: its processes see and do on the host whatever the user may who started it."""


@dataclass(frozen=True, slots=True)
class NamespaceSupport:
    """Best kind of namespace that this machine grants.

    Attributes:
        reason: why no better kind works; empty for `ROOT`.
        forced: whether the user chose the kind.
    """

    kind: NamespaceKind
    reason: str
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Confinement:
    """Confinement of one device.

    Attributes:
        folder: the device's, on the host: `root` has its files, on `mnt` its `/` is mounted.
        name: its host name.
        uid: user and group of its processes, as they see themselves.
    """

    kind: NamespaceKind
    folder: Path
    name: str
    uid: int

    @classmethod
    def of(cls, kind: NamespaceKind, folder: Path, name: str) -> "Confinement":
        """Return the confinement of the device in `folder`."""
        return cls(kind, folder, name, _unused_uid() if kind is NamespaceKind.ROOT else SHELL_UID)

    def fork(self) -> int:
        """Fork; return 0 in the child, confined, and in this process the child's pid.

        The child is killed when this process dies. This process must have one thread only.
        """
        self._prepare()
        linux.set_child_subreaper()  # for the confined process loses its parent
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            between = os.fork()
            if between == 0:
                ours.close()
                with _reporting(theirs):
                    self._leave_host()
                    confined = os.fork()
                if confined:
                    theirs.send(f"pid {confined}".encode())
                    os._exit(0)
                with _reporting(theirs):
                    self._enter()
                    if not theirs.recv(_MAX_MESSAGE):  # it comes once the parent is the caller
                        os._exit(1)
                    linux.set_parent_death_signal(signal.SIGKILL)
                    theirs.send(b"confined")
                return 0
            theirs.close()
            confined = int(_expect(ours, "pid "))
            os.waitpid(between, 0)
            ours.send(b"go")
            try:
                _expect(ours, "confined")
            except OSError:
                os.waitpid(confined, 0)
                raise
        return confined

    def _prepare(self) -> None:
        """Make the device's folders, and give them to its user."""
        root = self.folder / "root"
        for name in DEVICE_FOLDERS:
            own = root / name
            if own.is_symlink() or not own.is_dir():  # the device may have left anything there
                own.unlink(missing_ok=True)
                own.mkdir(parents=True)
        boot_id = root / "boot_id"
        if boot_id.is_symlink() or not boot_id.is_file():
            boot_id.unlink(missing_ok=True)
            boot_id.touch()
        if os.geteuid() == 0:
            _give(root, self.uid if self.kind is NamespaceKind.ROOT else 0)

    def _leave_host(self) -> None:
        """Leave the host's namespaces; the next forked child is the first process of new ones."""
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC
        flags |= linux.CLONE_NEWNET | linux.CLONE_NEWUTS
        if self.kind is not NamespaceKind.USER:
            linux.unshare(flags)
            return
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(flags | linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{self.uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{self.uid} {gid} 1", encoding="ascii")

    def _enter(self) -> None:
        """Move into the device's `/` and give up all privileges."""
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
        tree = (self.folder / "mnt").resolve()
        linux.mount("tmpfs", str(tree), "tmpfs", _HARMLESS, "mode=0755")
        self._build(tree)
        _change_root(str(tree))
        linux.mount(f"{NAMESPACE_ROOT}/boot_id", _BOOT_ID, None, linux.MS_BIND)
        _restrict("/", linux.MS_RDONLY | _HARMLESS)
        linux.start_loopback()
        socket.sethostname(self.name)
        linux.leave_session_keyring()
        linux.drop_privileges(self.uid)

    def _build(self, tree: Path) -> None:
        for name in _SYSTEM:
            _show_system(Path("/", name), tree / name)
        _build_etc(tree / "etc", self.uid)
        _build_dev(tree / "dev")
        (tree / "proc").mkdir()
        # Read-only, for a container's root without privileges is still the owner of /proc/sys.
        linux.mount("proc", f"{tree}/proc", "proc", _HARMLESS | linux.MS_NOEXEC | linux.MS_RDONLY)
        (tree / "tmp").symlink_to("/data/local/tmp")
        root = self.folder / "root"
        for name in DEVICE_FOLDERS:
            _bind(root / name, tree / name, _HARMLESS)
        _bind(root, tree / NAMESPACE_ROOT.name, _HARMLESS)
        for source in (Path(_CPUS), *_interpreter_folders()):
            _show_system(source, _place(tree, source))


def _unused_uid() -> int:
    """Return the id of Android's `shell`, or the next one that is no user's of this host."""
    uid = SHELL_UID
    with contextlib.suppress(KeyError):
        while pwd.getpwuid(uid):
            uid += 1
    return uid


def _give(root: Path, uid: int) -> None:
    """Make a user the owner of a folder and of all below it; links are not followed."""
    try:
        os.chown(root, uid, uid)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise OSError(error.errno, f"chown: root's user namespace has no user {uid}") from error
    for parent, folders, files in os.walk(root):
        for path in (Path(parent, name) for name in (*folders, *files)):
            status = path.lstat()
            if (status.st_uid, status.st_gid) != (uid, uid):
                os.lchown(path, uid, uid)
                if not stat.S_ISLNK(status.st_mode):
                    path.chmod(stat.S_IMODE(status.st_mode) & 0o777)


def _interpreter_folders() -> list[Path]:
    """Return the folders of the Python interpreter that the system's own do not contain."""
    prefixes = {Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
    system = [Path("/", name) for name in _SYSTEM]
    return [
        prefix / name
        for prefix in sorted(prefixes)
        if prefix != Path("/") and not any(prefix.is_relative_to(folder) for folder in system)
        for name in ("bin", "lib", "lib64")
    ]


def _build_etc(etc: Path, uid: int) -> None:
    etc.mkdir()
    for name in _ETC:
        _show_system(Path("/etc", name), etc / name)
    users = f"root:x:0:0:root:/:/bin/sh\nshell:x:{uid}:{uid}:shell:/:/bin/sh\n"
    (etc / "passwd").write_text(users, encoding="ascii")
    (etc / "group").write_text(f"root:x:0:\nshell:x:{uid}:\n", encoding="ascii")
    (etc / "hosts").write_text("127.0.0.1 localhost\n", encoding="ascii")


def _build_dev(dev: Path) -> None:
    dev.mkdir()
    for name in _NODES:
        (dev / name).touch()
        linux.mount(f"/dev/{name}", str(dev / name), None, linux.MS_BIND)
    for name, target in _DEV_LINKS.items():
        (dev / name).symlink_to(target)
    (dev / "pts").mkdir()
    terminals = "newinstance,ptmxmode=0666,mode=0620"
    no_programs = linux.MS_NOSUID | linux.MS_NOEXEC
    linux.mount("devpts", str(dev / "pts"), "devpts", no_programs, terminals)
    (dev / "shm").mkdir()
    linux.mount("tmpfs", str(dev / "shm"), "tmpfs", _HARMLESS, "mode=1777")


def _show_system(source: Path, target: Path) -> None:
    """Show a file or folder of the host read-only, if it exists."""
    try:
        mode = source.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode) and source.parent in {Path("/"), Path("/etc")}:
        target.symlink_to(source.readlink())
    else:
        _bind(source, target, linux.MS_RDONLY | _HARMLESS)


def _bind(source: Path, target: Path, flags: int) -> None:
    """Bind a file or folder with all that is mounted below it, and restrict each mount."""
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch(exist_ok=True)
    linux.mount(str(source), str(target), None, linux.MS_BIND | linux.MS_REC)
    for mounted in _mounts_below(str(target)):
        _restrict(mounted, flags)


def _place(tree: Path, path: Path) -> Path:
    """Return where a path of the host lies in the tree, with the folders above it."""
    # They may lie in the device's `/data`, where the device could have left links to elsewhere.
    place = tree
    for part in path.parts[1:]:
        place.mkdir(exist_ok=True)
        place /= part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "the device has a link where the host's Python lies", path)
    return place


def _mounts_below(target: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [
        os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in lines
    ]
    return [point for point in points if point == target or point.startswith(f"{target}/")]


def _restrict(mounted: str, flags: int) -> None:
    """Add flags to a mount; those that it has stay, as a user namespace may not drop them."""
    own_flags = os.statvfs(mounted).f_flag & _MOUNT_FLAGS
    linux.mount(None, mounted, None, linux.MS_REMOUNT | linux.MS_BIND | own_flags | flags)


def _change_root(new: str) -> None:
    os.chdir(new)
    try:
        linux.pivot_root(".", ".")
        linux.detach(".")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An initial ramdisk cannot be pivoted away from. Without capabilities nobody leaves this.
        linux.mount(".", "/", None, linux.MS_MOVE)
        os.chroot(".")
    os.chdir("/")


@contextlib.contextmanager
def _reporting(channel: socket.socket) -> Iterator[None]:
    """End this forked process if the body fails, and say why."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other side raises it
        with contextlib.suppress(OSError):
            channel.send(f"{error}".encode()[:_MAX_MESSAGE])
        os._exit(1)


def _expect(channel: socket.socket, start: str) -> str:
    """Return the next message without `start`; any other message is an error's text."""
    message = channel.recv(_MAX_MESSAGE).decode("utf-8", "replace")
    if not message.startswith(start):
        raise OSError(message or "its process ended")
    return message.removeprefix(start)


def expected_namespace() -> NamespaceKind | None:
    """Return the kind that will be granted as far as one can tell without a try, or `None`."""
    if os.environ.get(FORCE_VARIABLE) in {kind.value for kind in NamespaceKind}:
        return None
    if os.geteuid() != 0:
        return NamespaceKind.USER
    return NamespaceKind.ROOT if linux.may_administer() else None


def probe_namespace() -> NamespaceSupport:
    """Return the best kind that works here, or the one that `QNNFARM_VIRTUAL_NAMESPACE` forces."""
    forced = os.environ.get(FORCE_VARIABLE, "auto")
    if forced in {kind.value for kind in NamespaceKind}:
        return NamespaceSupport(NamespaceKind(forced), f"{FORCE_VARIABLE}={forced}", forced=True)
    reasons: list[str] = []
    for kind in (NamespaceKind.ROOT, NamespaceKind.USER):
        if kind is NamespaceKind.ROOT and os.geteuid() != 0:
            reasons.append("not root")
            continue
        failure = try_namespace(kind)
        if failure is None:
            return NamespaceSupport(kind, "; ".join(reasons))
        reasons.append(f"{kind.value} namespace: {failure}")
    return NamespaceSupport(NamespaceKind.NONE, "; ".join(reasons))


def try_namespace(kind: NamespaceKind) -> str | None:
    """Try a kind of namespace in a child process; return the reason of a failure, or `None`."""
    command = [sys.executable, "-P", "-m", "plugins.virtual_android.namespace", kind.value]
    with tempfile.TemporaryDirectory(prefix="qnnfarm-probe-") as folder:
        try:
            result = subprocess.run(
                [*command, folder],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_TIMEOUT_S:g} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {result.returncode}"


def _attempt(kind: NamespaceKind, folder: Path) -> int:
    (folder / "mnt").mkdir()
    try:
        confined = Confinement.of(kind, folder, "probe").fork()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not confined:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(confined, 0)[1])


if __name__ == "__main__":
    sys.exit(_attempt(NamespaceKind(sys.argv[1]), Path(sys.argv[2])))
