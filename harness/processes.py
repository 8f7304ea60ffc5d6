"""Processes of this host: what tells one from others, and whether it has ended.

A pid is another process's after a while, and start times that libraries give move with the wall
clock. So a process is a pid and the clock ticks from the boot to its start, within one boot and
one pid namespace.
"""

import os
from pathlib import Path

import psutil

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def boot_id() -> str:
    """Return the id of this host's boot; `unknown` where the system has none."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


def pid_namespace() -> str:
    """Return the pid namespace of this process; empty where the system has none."""
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def own_start() -> int:
    """Return the ticks from the boot to the start of this process."""
    return _state_and_start(os.getpid())[1]


def has_ended(pid: int, started: int) -> bool:
    """Return whether a process of this boot and namespace is known to have ended.

    A zombie has. Nothing is known of another user's process that `/proc` hides (`hidepid`) while
    some process has its pid.
    """
    if pid <= 0:
        return True
    try:
        state, start = _state_and_start(pid)
    except OSError:
        return not _exists(pid)
    return start != started or state in {"Z", "X"}


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return fields 3 and 22 of /proc/PID/stat (proc(5)), or what they would be."""
    if (_PROC / "self").exists():
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before it may hold any character
        return fields[0], int(fields[19])
    try:
        process = psutil.Process(pid)
        state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "R"
        return state, round(process.create_time() * _TICKS_PER_S)
    except psutil.Error as error:
        raise ProcessLookupError from error


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
