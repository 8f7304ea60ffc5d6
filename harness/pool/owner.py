"""Processes that hold leases: their identity, and whether they have ended."""

import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from harness.devices.socket_owner import user_name
from harness.errors import one_line

_LONGEST_LABEL = 120
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, identified beyond the reuse of its pid, and beyond its host.

    Attributes:
        host: its host, as `NAME/MACHINE-ID`.
        boot: boot id of the host; pid and start time may repeat after a reboot.
        started: clock ticks between the boot of the host and the start of the process.
        namespace: its pid namespace; pids of other namespaces mean nothing here.
        label: for people.
    """

    host: str
    boot: str
    pid: int
    started: int
    namespace: str
    label: str = ""

    @property
    def user(self) -> str:
        """The account that it runs under, which its label begins with."""
        return self.label.partition(":")[0]

    def __str__(self) -> str:
        """Return its label, with the host if that is another one."""
        node = self.host.partition("/")[0]
        return self.label if self.host == host_id() else f"{self.label} on {node}"


def has_ended(owner: Owner) -> bool:
    """Return whether a process is known to have ended.

    Nothing is known of other hosts and namespaces, nor of another user's process that `/proc` hides
    (`hidepid`) while some process has its pid.
    """
    if owner.host != host_id():
        return False
    if owner.boot != _boot_id():
        return True
    if owner.namespace != _namespace():
        return False
    if owner.pid <= 0:
        return True
    try:
        process = _find_process(owner.pid, owner.started)
        if process is None or not process.is_running():
            return True
        return process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.Error:
        return not _exists(owner.pid)


def this_process(environ: Mapping[str, str] = os.environ) -> Owner:
    """Return the calling process."""
    pid = os.getpid()
    label = _label(pid, environ)
    return Owner(host_id(), _boot_id(), pid, _started(pid), _namespace(), label)


def host_id() -> str:
    """Return the id of this host, also beside others with the same home directory."""
    machine = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()[:32]
    return f"{platform.node()}/{machine}"


@lru_cache(maxsize=1024)
def _find_process(pid: int, started: int) -> psutil.Process | None:
    """Return the process that has that pid and start; `None` says that it has ended, for ever."""
    process = psutil.Process(pid)
    return process if _started(pid) == started else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _started(pid: int) -> int:
    """Return the clock ticks between boot and the start of a process."""
    # psutil adds the boot time as the wall clock has it, which moves when that clock is set: it is
    # taken off again, once it stood still meanwhile.
    while True:
        boot = psutil.boot_time()
        created = psutil.Process(pid).create_time()
        if psutil.boot_time() == boot:
            return round((created - boot) * _TICKS_PER_S)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _label(pid: int, environ: Mapping[str, str]) -> str:
    """Format as `ann: pytest gw1 (pid 123)`; arguments are left out, for they may hold secrets."""
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    if program == "__main__.py":
        program = Path(sys.argv[0]).parent.name
    worker = environ.get("PYTEST_XDIST_WORKER", "")
    if program == "-c":  # so pytest-xdist starts its workers
        program = "pytest" if worker else "python"
    text = f"{user_name(os.getuid())}: {' '.join(filter(None, (program, worker)))}"
    return f"{one_line(text, _LONGEST_LABEL)} (pid {pid})"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
