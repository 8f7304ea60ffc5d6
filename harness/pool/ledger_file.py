"""File of the ledger: where it lies, and which folders can have it."""

import hashlib
import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from harness.devices.socket_owner import user_name
from harness.errors import LedgerError
from harness.paths import state_dir
from harness.pool.owner import host_id

_NETWORK_TYPES = frozenset(
    ["9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.glusterfs", "fuse.rclone",
     "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
     "ocfs2", "orangefs", "smb3", "smbfs"]
)  # fmt: skip
"""File systems that several hosts may have mounted; SQLite's locks are not theirs."""


def default_path() -> Path:
    """Return the path of this user's ledger."""
    return state_dir() / "pool.db"


def place_of(path: Path) -> int:
    """Return a number that another machine, folder or copy of a ledger does not have."""
    machine = host_id().partition("/")[2]
    text = f"{machine} {path.resolve()} {path.stat().st_ino}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7])


def prepare(path: Path) -> None:
    """Make the ledger's folder if it is missing.

    Raises:
        LedgerError: the folder cannot have this user's ledger.
        OSError: it cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_folder(path)
    if kind := network_file_system(path.parent):
        reason = (
            f"it would lie on a network file system ({kind}), where other hosts take it for theirs:"
            " name a local folder with QNNFARM_STATE_DIR, or share a ledger in PostgreSQL"
        )
        raise LedgerError(str(path), reason)


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
    return (
        f"its folder belongs to {user_name(about.st_uid)}: name another with QNNFARM_STATE_DIR, "
        "or share a ledger in PostgreSQL"
    )
