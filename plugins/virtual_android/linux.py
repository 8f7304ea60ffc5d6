"""Linux interfaces that Python lacks: `/proc` entries of processes, and system calls through libc.

System calls raise `OSError` if the kernel refuses. Constants come from its uapi headers; they are
the same on every architecture.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC = Path("/proc")
_READ_BYTES = 64 * 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_MOVE: Final = 8192
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = range(64)
_CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522
_KEYCTL: Final = {"x86_64": 250, "aarch64": 219}
"""Number of keyctl(2), for which libc has no function."""
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Fields of `/proc/PID/stat` (proc_pid_stat(5)).

    Attributes:
        terminal: device number of its controlling terminal, 0 for none.
        cpu_s: seconds of CPU time that it used, with the children that it has waited for.
        started: clock ticks between the machine's boot and the start of the process; with the
            pid it identifies a process.
    """

    pid: int
    state: str
    parent: int
    group: int
    session: int
    terminal: int
    cpu_s: float
    started: int

    @property
    def alive(self) -> bool:
        """True if it still runs: neither a zombie nor dead."""
        return self.state not in {"Z", "X"}


def process_stat(pid: int) -> ProcessStat | None:
    """Return the process of that pid, if it exists."""
    content = _read(pid, "stat")
    if not content:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    parent, group, session, terminal = map(int, fields[1:5])
    cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
    state = fields[0].decode()
    return ProcessStat(pid, state, parent, group, session, terminal, cpu_s, started=int(fields[19]))


def command_line(pid: int) -> list[bytes]:
    """Return the arguments of a process; empty for one that is gone, or a zombie."""
    return _read(pid, "cmdline").split(b"\0")[:-1]


def environment_of(pid: int) -> list[bytes]:
    """Return the initial environment of a process as `NAME=value`; empty if unreadable."""
    content = _read(pid, "environ")
    return content.split(b"\0") if content else []


def has_mapped(pid: int, library: str) -> bool:
    """Return whether a process has loaded a library of its folder, which may be a link there."""
    names = {library.encode()}
    with contextlib.suppress(OSError):
        names.add(Path(f"/proc/{pid}/cwd/{library}").readlink().name.encode())
    ends = tuple(b"/" + name for name in names)
    return any(line.endswith(ends) for line in _read(pid, "maps").splitlines())


def write_stderr(pid: int, text: str) -> None:
    """Append text to the stderr of a process, if it is still open."""
    with contextlib.suppress(OSError):
        file = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if it cannot be read."""
    # Devices read hundreds of these a second. `pathlib` takes twice as long.
    try:
        file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    except OSError:
        return b""
    try:
        content = part = os.read(file, _READ_BYTES)
        while part:
            part = os.read(file, _READ_BYTES)
            content += part
    except OSError:  # it has ended meanwhile
        return b""
    finally:
        os.close(file)
    return content


def all_processes() -> list[ProcessStat]:
    """Return every process that this one can see."""
    pids = [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdecimal()]
    return [process for pid in pids if (process := process_stat(pid)) is not None]


def descendants(pid: int) -> list[ProcessStat]:
    """Return all descendants of a process, zombies included, parents before children."""
    children: dict[int, list[ProcessStat]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    result: list[ProcessStat] = []
    parents = [pid]
    while parents:
        below = children.get(parents.pop(), [])
        result += below
        parents += [process.pid for process in below]
    return result


def may_administer() -> bool:
    """Return whether this process has `CAP_SYS_ADMIN`, which mounts and namespaces ask for."""
    for line in (_PROC / "self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_SYS_ADMIN & 1)
    return False


def unshare(flags: int) -> None:
    """Leave the namespaces of `flags` for new ones."""
    try:
        _call("unshare", ctypes.c_int(flags))
    except OSError as error:
        if error.errno == errno.ENOSPC:  # "No space left on device", by which no disk is meant
            limit = "a limit of /proc/sys/user/max_*_namespaces is 0 or reached"
            raise OSError(error.errno, f"unshare: {limit}") from error
        raise


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Attach a file system, bind a folder, or change flags and propagation of one."""
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
    """Unmount lazily."""
    _call("umount2", os.fsencode(target), ctypes.c_int(MNT_DETACH), subject=target)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace."""
    _call("pivot_root", os.fsencode(new_root), os.fsencode(put_old), subject=new_root)


def set_child_subreaper() -> None:
    """Let orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int) -> None:
    """Let the kernel signal this process when its parent dies; a change of user undoes it."""
    _prctl(_PR_SET_PDEATHSIG, number)


def leave_session_keyring() -> None:
    """Take a new session keyring, without the keys of the login that started this process."""
    number = _KEYCTL.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError):  # a kernel without keys, or a filter that refuses it
            arguments = (_KEYCTL_JOIN_SESSION_KEYRING, 0)
            _call("syscall", ctypes.c_long(number), *map(ctypes.c_ulong, arguments))


def start_loopback() -> None:
    """Bring up the loopback of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def drop_privileges(uid: int) -> None:
    """Become a user without capabilities, for good: no program that is run later gains any.

    Other processes of that user can neither trace this one nor open its files through `/proc`.
    """
    for capability in _CAPABILITIES:
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # the kernel has no more
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _call("capset", header, bytes(24))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    zeros = [ctypes.c_ulong(0)] * 3
    _call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), *zeros)


def _call(name: str, *arguments: object, subject: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", subject or None)
