"""What faults do to a device."""

import signal
from dataclasses import dataclass
from pathlib import PurePosixPath

from harness.virtual_device.connection import Connection
from harness.virtual_device.faults import Runner
from harness.virtual_device.heat.throttling import Throttler
from harness.virtual_device.processes import ProcessTable, send_signal
from harness.virtual_device.procfs import ProcessStat, command_line
from harness.virtual_device.storage import Storage
from harness.virtual_device.userland import Userland
from harness.virtual_device.wishes import Wish, Wishes, WishKind

_SHELLS = {"sh", "dash", "bash", "mksh"}


@dataclass(frozen=True, slots=True)
class DeviceEffects:
    """The parts of a device that faults strike; an `injection.Effects`."""

    connections: list[Connection]
    processes: ProcessTable
    throttler: Throttler
    storage: Storage
    userland: Userland
    wishes: Wishes

    def drop(self) -> None:
        """Break all connections."""
        for connection in list(self.connections):
            connection.abort()

    def freeze(self) -> None:
        """Let nothing pass on any connection."""
        for connection in self.connections:
            connection.freeze()

    def thaw(self) -> None:
        """Let everything pass again."""
        for connection in self.connections:
            connection.thaw()

    def reboot(self) -> None:
        """Reboot soon."""
        self.wishes.add(Wish(WishKind.REBOOT))

    def lose_power(self, off_s: float, unsynced_s: float) -> None:
        """Go dark: connections at once, all else by the device in its turn."""
        self.drop()
        self.wishes.add(Wish(WishKind.POWER_CUT, off_s, unsynced_s))

    def squeeze(self, free: int | None) -> None:
        """Let `/data` take only so many more bytes; `None` for as many as ever."""
        self.storage.squeeze(free)
        self.userland.show_limit(self.storage.limit_bytes)

    def throttle(self, factor: float) -> None:
        """Give processes 1/factor of their time."""
        self.throttler.limit("fault", 1 / factor)

    def strike_runner(self, pid: int, fault: Runner) -> list[int]:
        """Signal the matching processes below `pid`; which they were."""
        number = signal.Signals[f"SIG{fault.signal}"]
        struck = [
            process.pid
            for process in self._below(pid)
            if process.alive and _matches(command_line(process.pid), fault.match.encode())
        ]
        for victim in struck:
            if number is signal.SIGSTOP:
                self.throttler.leave_stopped(victim)
            send_signal(victim, number)
        return struck

    def _below(self, pid: int) -> list[ProcessStat]:
        found = self.processes.mine()
        below = {pid}
        for process in found:  # parents come before children
            if process.parent in below or process.session == pid:
                below.add(process.pid)
        return [process for process in found if process.pid in below]


def _matches(arguments: list[bytes], text: bytes) -> bool:
    if not arguments or PurePosixPath(arguments[0].decode("utf-8", "replace")).name in _SHELLS:
        return False
    return any(text in argument for argument in arguments)
