"""Which process holds something, and whether it still lives."""

import getpass
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.virtual_device.linux import machine_boot_id, process_stat

_LONGEST_LABEL = 120


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, named for good.

    Attributes:
        started: clock ticks since boot at which it began; a pid alone may be used again.
        boot: boot id of the host, for a pid and a start time may both come again.
        namespace: its pid namespace; the pid of another one says nothing here.
        label: for people.
    """

    pid: int
    started: int
    boot: str
    namespace: str
    label: str = ""


def has_ended(owner: Owner) -> bool:
    """Whether a process is known to have ended; of other pid namespaces nothing is known."""
    if owner.boot != machine_boot_id():
        return True
    if owner.namespace != _namespace():
        return False
    found = process_stat(owner.pid)
    return found is None or not found.alive or found.started != owner.started


def this_process(environ: Mapping[str, str] = os.environ) -> Owner:
    """The process that asks."""
    pid = os.getpid()
    found = process_stat(pid)
    return Owner(
        pid, found.started if found else 0, machine_boot_id(), _namespace(), _label(pid, environ)
    )


def _label(pid: int, environ: Mapping[str, str]) -> str:
    """`ann: pytest gw1 (pid 123)`; arguments are left out, for they may hold secrets."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    if program == "__main__.py":
        program = Path(sys.argv[0]).parent.name
    worker = environ.get("PYTEST_XDIST_WORKER", "")
    if program == "-c":  # so pytest-xdist starts its workers
        program = "pytest" if worker else "python"
    text = f"{user}: {' '.join(filter(None, (program, worker)))}"
    shown = "".join(c if c.isprintable() else " " for c in text)[:_LONGEST_LABEL]
    return f"{shown} (pid {pid})"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
