"""File of the ledger: where it lies, and the modes by which the users of a group share it.

SQLite gives its `-wal` and `-shm` files the mode of the ledger under any umask, so only that file
and its folder are seen to here.
"""

import grp
import hashlib
import os
import shlex
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from harness.devices.socket_owner import user_name
from harness.errors import LedgerError
from harness.paths import is_shared, ledger_dir
from harness.pool.owner import host_id

_SHARED_MODE = 0o660
_SIDE_FILES = ("-wal", "-shm")
_NETWORK_TYPES = frozenset(
    ["9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.glusterfs", "fuse.rclone",
     "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
     "ocfs2", "orangefs", "smb3", "smbfs"]
)  # fmt: skip
"""File systems that several hosts may have mounted; SQLite's locks are not theirs."""


def default_path() -> Path:
    """Return the path of the ledger of this user, or of several: see `ledger_dir`."""
    return ledger_dir() / "pool.db"


def place_of(path: Path) -> int:
    """Return a number that another machine, folder or copy of a ledger does not have."""
    machine = host_id().partition("/")[2]
    text = f"{machine} {path.resolve()} {path.stat().st_ino}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7])


def prepare(path: Path) -> None:
    """Make the ledger's folder if it is missing, and let the users of a group write the ledger.

    Raises:
        LedgerError: the modes of the folder or the file make sharing impossible or unsafe.
        OSError: they cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_folder(path)
    if kind := network_file_system(path.parent):
        reason = (
            f"it would lie on a network file system ({kind}), where other hosts take it for theirs:"
            " name a local folder with QNNFARM_STATE_DIR, or share a ledger in PostgreSQL"
        )
        raise LedgerError(str(path), reason)
    if is_shared(path.parent):
        if not path.exists():
            _create(path)
        if obstacle := _share(path, path.parent.stat().st_gid):
            raise LedgerError(str(path), obstacle)


def check_folder(path: Path) -> None:
    """Check that the folder of a ledger, if it exists, may have one of this user."""
    with suppress(FileNotFoundError):
        if obstacle := _folder_obstacle(path.parent, path.parent.stat()):
            raise LedgerError(str(path), obstacle)


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the network file system that a folder is on; empty if it is on none."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2:3] == [device] and (kind := rest.partition(" ")[0]):
                return kind if kind in _NETWORK_TYPES else ""
    return ""


def users_of(path: Path) -> str:
    """Return the owner of a ledger, for people: `ann`, or `the group qnnfarm`."""
    if is_shared(path.parent):
        return f"the group {_group_name(path.parent.stat().st_gid)}"
    return user_name(os.geteuid())


def _folder_obstacle(folder: Path, about: os.stat_result) -> str:
    """Return why a folder can have no ledger of this user; empty if it can."""
    quoted = shlex.quote(str(folder))
    if about.st_mode & stat.S_IWOTH:
        mode = f"mode {stat.S_IMODE(about.st_mode):04o}"
        return (
            f"every user of this host may write its folder ({mode}): "
            f"`chmod o-w {quoted}`, or name another with QNNFARM_STATE_DIR"
        )
    if os.geteuid() in {0, about.st_uid}:
        return ""
    if not is_shared(folder):
        return (
            f"its folder belongs to {user_name(about.st_uid)} and is not set up for a group: "
            f"`chgrp GROUP {quoted} && chmod 2770 {quoted}`, or name another with QNNFARM_STATE_DIR"
        )
    if about.st_gid not in {os.getegid(), *os.getgroups()}:
        group, user = _group_name(about.st_gid), user_name(os.geteuid())
        return (
            f"its folder is for the group {group}, which {user} is not in: "
            f"`sudo usermod -aG {shlex.quote(group)} {shlex.quote(user)}`, then log in again; "
            "or name another folder with QNNFARM_STATE_DIR"
        )
    return ""


def _create(path: Path) -> None:
    """Create an empty file that has its mode as soon as it has its name."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.fchmod(number, _SHARED_MODE)
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.close(number)
        os.unlink(name)  # noqa: PTH108 - beside its os.link


def _share(path: Path, group: int) -> str:
    """Give the files of a ledger to a group; return why that is impossible, or empty."""
    for file in (path, *(path.with_name(path.name + suffix) for suffix in _SIDE_FILES)):
        try:
            # An O_PATH descriptor neither follows links nor, when closed, drops SQLite's locks.
            number = os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if obstacle := _share_file(file, number, group):
                return obstacle
        finally:
            os.close(number)
    return ""


def _share_file(file: Path, number: int, group: int) -> str:
    about = os.fstat(number)
    plain = stat.S_ISREG(about.st_mode)
    if plain and about.st_gid == group and stat.S_IMODE(about.st_mode) == _SHARED_MODE:
        return ""
    if not plain or about.st_nlink > 1:  # our own file may be behind it
        return f"{file.name} is a link, or no file: in a group's folder it must be a plain file"
    if os.geteuid() not in {0, about.st_uid}:
        quoted, name = shlex.quote(str(file)), _group_name(group)
        return (
            f"{file.name} belongs to {user_name(about.st_uid)} and is not shared with the group: "
            f"`sudo chgrp {shlex.quote(name)} {quoted} && sudo chmod 660 {quoted}`"
        )
    itself = f"/proc/self/fd/{number}"
    os.chown(itself, -1, group)
    os.chmod(itself, _SHARED_MODE)  # noqa: PTH101 - a descriptor
    return ""


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
