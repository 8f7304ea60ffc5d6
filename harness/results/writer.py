"""Who writes a run, so that a reader can tell a run in progress from one whose process died."""

import os
from pathlib import Path

_SEPARATOR = ":"


def this_writer() -> str:
    """The mark of this process: boot, PID namespace, PID, and start time in ticks since boot."""
    pid = os.getpid()
    return _SEPARATOR.join((_boot(), _pid_namespace(), str(pid), _start_time(pid) or "?"))


def is_gone(writer: str) -> bool:
    """Whether the process is known to have ended; nothing is known of another machine's."""
    boot, namespace, pid, started = (writer.split(_SEPARATOR) + [""] * 4)[:4]
    if not boot or boot != _boot() or not namespace or namespace != _pid_namespace():
        return False
    return pid.isascii() and pid.isdigit() and _start_time(int(pid)) != started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        mark = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  no path: "pid:[4026531836]"
        return mark.removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat (proc(5)); the name before it may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else None
