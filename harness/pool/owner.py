"""Processes that hold leases: their identity, and whether they have ended."""

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from harness import processes
from harness.clock import format_time
from harness.devices.socket_owner import user_name
from harness.errors import one_line

_LONGEST_LABEL = 120
_Text = Annotated[str, Field(max_length=200), AfterValidator(one_line)]
_Number = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, identified beyond the reuse of its pid, and beyond its host.

    Attributes:
        host: its host, as `NAME/MACHINE-ID`.
        boot: boot id of the host; pid and start time may repeat after a reboot.
        started: clock ticks between the boot of the host and the start of the process.
        namespace: its pid namespace; pids of other namespaces mean nothing here.
        label: for people.
        since: seconds since 1970 at which it began to claim a device, as its fence there says.
    """

    host: _Text = ""
    boot: _Text = ""
    pid: _Number = 0
    started: _Number = 0
    namespace: _Text = ""
    label: _Text = ""
    since: Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)] = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what a device says of its holder; what cannot be read is nobody known."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError:
            return cls()

    @property
    def user(self) -> str:
        """The account that it runs under, which its label begins with."""
        return self.label.partition(":")[0]

    def describe(self, now: float) -> str:
        """Describe it for people: `ann: pytest (pid 123) on lab2, since 10:02:11`."""
        return f"{self}, since {format_time(self.since, now)}" if self.label else str(self)

    def __str__(self) -> str:
        """Return its label, with the host if that is another one."""
        node = self.host.partition("/")[0]
        if not self.label:
            return "a holder that is not known"
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


def this_process() -> Owner:
    """Return the calling process."""
    boot, namespace = processes.boot_id(), processes.pid_namespace()
    pid, started = os.getpid(), processes.own_start()
    return Owner(host_id(), boot, pid, started, namespace, _label(pid))


def host_id() -> str:
    """Return the id of this host, also beside others with the same home directory."""
    machine = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()[:32]
    return f"{platform.node()}/{machine}"


def _label(pid: int) -> str:
    """Format as `ann: pytest gw1 (pid 123)`; arguments are left out, for they may hold secrets."""
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    if program == "__main__.py":
        program = Path(sys.argv[0]).parent.name
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if program == "-c":  # so pytest-xdist starts its workers
        program = "pytest" if worker else "python"
    text = f"{user_name(os.getuid())}: {' '.join(filter(None, (program, worker)))}"
    return f"{one_line(text, _LONGEST_LABEL)} (pid {pid})"
