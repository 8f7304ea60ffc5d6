"""Processes that hold leases: their identity, and whether they have ended."""

import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.devices.socket_owner import user_name
from harness.errors import one_line

_LONGEST_LABEL = 120


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

    Nothing is known of other hosts and namespaces.
    """
    if owner.host != host_id():
        return False
    if owner.boot != processes.boot_id():
        return True
    if owner.namespace != processes.pid_namespace():
        return False
    return processes.has_ended(owner.pid, owner.started)


def this_process(environ: Mapping[str, str] = os.environ) -> Owner:
    """Return the calling process."""
    boot, namespace = processes.boot_id(), processes.pid_namespace()
    pid, started = os.getpid(), processes.own_start()
    return Owner(host_id(), boot, pid, started, namespace, _label(pid, environ))


def host_id() -> str:
    """Return the id of this host, also beside others with the same home directory."""
    machine = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()[:32]
    return f"{platform.node()}/{machine}"


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
