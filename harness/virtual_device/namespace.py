"""A device's own view of files and processes: Linux namespaces, where the kernel grants them.

Inside, `/` is a new folder in which every top-level entry of the host is bind-mounted and
`/data`, `/sdcard` and `/system` are the device's own. The process is the first of a PID
namespace, so its orphans die with it, and commands see no process of the host.
Propagation is private: no mount shows on the host.

As a program, `python -m harness.virtual_device.namespace KIND FOLDER` makes one and exits 0, or
prints the error: a process that entered a namespace cannot leave it again.
"""

import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.virtual_device import linux
from harness.virtual_device.filesystem import DEVICE_FOLDERS, NAMESPACE_ROOT

log = logging.getLogger(__name__)

_BOOT_ID = "/proc/sys/kernel/random/boot_id"

FORCE_VARIABLE = "QNNFARM_VIRTUAL_NAMESPACE"
"""Environment variable that forces a kind: `root`, `user`, `none`, or `auto`."""
_TIMEOUT_S = 20.0


class NamespaceKind(StrEnum):
    """Kind of namespace that gives a device its own root folder."""

    ROOT = "root"
    """A mount namespace, made with the privileges of root."""
    USER = "user"
    """A mount namespace within a user namespace, which needs no privileges."""
    NONE = "none"
    """No namespace: paths are mapped for push and pull, `$TMPDIR` names the writable folder."""


@dataclass(frozen=True, slots=True)
class NamespaceSupport:
    """Best kind of namespace that this machine grants.

    Attributes:
        reason: why no better kind works; empty for `ROOT`.
    """

    kind: NamespaceKind
    reason: str


def unshare(kind: NamespaceKind) -> None:
    """Leave the host's namespaces; the next forked child is the first process of the new ones.

    The process must have one thread only.
    """
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC
    if kind is not NamespaceKind.USER:
        linux.unshare(flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(flags | linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def enter_device_root(root: Path, mount_point: Path) -> None:
    """Build the device's `/` at `mount_point`, an empty folder, and move there.

    Must run in the child forked after `unshare`.
    """
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    new = str(mount_point)
    no_risk = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", new, "tmpfs", no_risk, "mode=0755")
    own = {name: str(root / name) for name in DEVICE_FOLDERS}
    own[NAMESPACE_ROOT.name] = str(root)
    if Path("/data").is_dir() and not Path("/data").is_symlink():
        # A host that keeps its own things in /data (environments, homes) still sees them there;
        # the device's own entries are those that it had at its start, `local` above all.
        data = own.pop("data")
        Path(data, "local").mkdir(exist_ok=True)
        Path(new, "data").mkdir(mode=0o755)
        _bind_entries(
            "/data", f"{new}/data", {path.name: str(path) for path in Path(data).iterdir()}
        )
    _bind_entries("/", new, own, skip={"data", "proc"})
    Path(new, "proc").mkdir(mode=0o555)
    linux.mount("proc", f"{new}/proc", "proc", no_risk | linux.MS_NOEXEC)
    if Path(f"{new}/dev/shm").is_dir():  # noqa: S108 - the mount point itself
        linux.mount("tmpfs", f"{new}/dev/shm", "tmpfs", no_risk, "mode=1777")  # noqa: S108
    _change_root(new)
    linux.mount(None, "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | no_risk)


def bind_boot_id(file: Path) -> None:
    """Bind `file` over the kernel's boot id."""
    try:
        linux.mount(str(file), _BOOT_ID, None, linux.MS_BIND)
    except OSError as error:
        log.warning("the boot id stays the host's: %s", error)


def _bind_entries(
    source: str, target: str, own: dict[str, str], *, skip: frozenset[str] | set[str] = frozenset()
) -> None:
    """Bind every entry of `source` in `target`, those of `own` in place of the host's."""
    for name in sorted({path.name for path in Path(source).iterdir()} - set(own) - set(skip)):
        try:
            _show(Path(source, name), Path(target, name))
        except OSError as error:
            log.warning("%s of the host does not show on the device: %s", name, error)
    for name, path in own.items():
        _show(Path(path), Path(target, name))


def _show(source: Path, target: Path) -> None:
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        target.symlink_to(source.readlink())
        return
    if stat.S_ISDIR(mode):
        target.mkdir(mode=0o755)
    else:
        target.touch(mode=0o644, exist_ok=False)
    linux.mount(str(source), str(target), None, linux.MS_BIND | linux.MS_REC)


def _change_root(new: str) -> None:
    os.chdir(new)
    try:
        linux.pivot_root(".", ".")
        linux.detach(".")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.chroot(".")  # an initial ramdisk cannot be pivoted away from
    os.chdir("/")


def probe_namespace() -> NamespaceSupport:
    """Return the best kind that works here, or the one that `QNNFARM_VIRTUAL_NAMESPACE` forces."""
    forced = os.environ.get(FORCE_VARIABLE, "auto")
    if forced in {kind.value for kind in NamespaceKind}:
        return NamespaceSupport(NamespaceKind(forced), f"{FORCE_VARIABLE}={forced}")
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
    command = [sys.executable, "-P", "-m", "harness.virtual_device.namespace", kind.value]
    with tempfile.TemporaryDirectory(prefix="qnnfarm-probe-") as folder:
        try:
            done = subprocess.run(
                [*command, folder],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _attempt(kind: NamespaceKind, folder: Path) -> int:
    root, mount_point = folder / "root", folder / "mnt"
    mount_point.mkdir()
    for name in DEVICE_FOLDERS:
        (root / name).mkdir(parents=True)
    try:
        unshare(kind)
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        enter_device_root(root, mount_point)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_attempt(NamespaceKind(sys.argv[1]), Path(sys.argv[2])))
