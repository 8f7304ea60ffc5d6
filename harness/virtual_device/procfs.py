"""What `/proc` tells of processes."""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Fields of `/proc/PID/stat` (proc_pid_stat(5)).

    Attributes:
        terminal: device number of its controlling terminal, 0 for none.
        cpu_s: seconds of CPU time that it used, with the children that it has waited for.
        started: clock ticks between the machine's boot and the start of the process; with the
            pid it names a process for good.
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
        """Whether it still runs: neither a zombie nor dead."""
        return self.state not in {"Z", "X"}


def process_stat(pid: int) -> ProcessStat | None:
    """The process of that pid, if there is one."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    parent, group, session, terminal = map(int, fields[1:5])
    cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return ProcessStat(
        pid, fields[0], parent, group, session, terminal, cpu_s, started=int(fields[19])
    )


def command_line(pid: int) -> list[bytes]:
    """The arguments of a process; empty for one that is gone, or a zombie."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def environment_of(pid: int) -> list[bytes]:
    """`NAME=value` of what a process was started with; empty where that cannot be read."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def all_processes() -> list[ProcessStat]:
    """Every process that this one can see."""
    pids = [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdecimal()]
    return [found for pid in pids if (found := process_stat(pid)) is not None]


def descendants(pid: int) -> list[ProcessStat]:
    """Children of a process, theirs and so on, zombies included."""
    children: dict[int, list[ProcessStat]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[ProcessStat] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def machine_boot_id() -> str:
    """What tells one boot of this machine from another."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
