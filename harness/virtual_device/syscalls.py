"""The few Linux calls that Python 3.11 does not offer, through libc.

Constants from the kernel's uapi headers; they are the same on every architecture.
"""

import ctypes
import os
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def unshare(flags: int) -> None:
    """Leave the namespaces of `flags` for new ones.

    Raises:
        OSError: the kernel refuses.
    """
    _call("unshare", ctypes.c_int(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Attach a file system, bind a folder, or change flags and propagation of one.

    Raises:
        OSError: the kernel refuses.
    """
    _call(
        "mount",
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else os.fsencode(kind),
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
        subject=target,
    )


def detach(target: str) -> None:
    """Unmount lazily.

    Raises:
        OSError: the kernel refuses.
    """
    _call("umount2", os.fsencode(target), ctypes.c_int(MNT_DETACH), subject=target)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace.

    Raises:
        OSError: the kernel refuses.
    """
    _call("pivot_root", os.fsencode(new_root), os.fsencode(put_old), subject=new_root)


def set_child_subreaper() -> None:
    """Let orphaned descendants become children of this process.

    Raises:
        OSError: the kernel refuses.
    """
    _call(
        "prctl", ctypes.c_int(_PR_SET_CHILD_SUBREAPER), *[ctypes.c_ulong(n) for n in (1, 0, 0, 0)]
    )


def set_parent_death_signal(number: int) -> None:
    """Have this process get a signal when its parent dies.

    Raises:
        OSError: the kernel refuses.
    """
    zeros = [ctypes.c_ulong(0)] * 3
    _call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(number), *zeros)


def _call(name: str, *arguments: object, subject: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", subject or None)
