"""Power commands to a device's process: reboot, shut down, cut or restore the power."""

import asyncio
import contextlib
import enum
import os
from dataclasses import dataclass
from pathlib import Path

_MAX_READ = 4096


class PowerAction(enum.Enum):
    """Kind of a power command."""

    REBOOT = "reboot"
    SHUTDOWN = "shutdown"
    CUT = "cut"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class PowerCommand:
    """One command.

    Attributes:
        off_s: how long a cut lasts.
        unsynced_s: how far back changes to files are lost with a cut.
    """

    action: PowerAction
    off_s: float = 0.0
    unsynced_s: float = 0.0


class PowerQueue:
    """Power commands in the order given. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[PowerCommand] = asyncio.Queue()

    def put(self, command: PowerCommand) -> None:
        """Add a command."""
        self._queue.put_nowait(command)

    async def next(
        self, *actions: PowerAction, within_s: float = float("inf")
    ) -> PowerCommand | None:
        """Wait for a command of these kinds and drop all others; `None` after `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if within_s == float("inf") else within_s):
                while (command := await self._queue.get()).action not in actions:
                    pass
                return command
        return None


class PowerPipe:
    """A FIFO through which commands on the device ask for a reboot or a shutdown, a line each."""

    def __init__(self, path: Path, power: PowerQueue) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Open for writing too, so that it never ends and no writer has to wait for us.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._power = power
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._descriptor, _MAX_READ).split(b"\n"):
                for action in (PowerAction.REBOOT, PowerAction.SHUTDOWN):
                    if line == action.value.encode():
                        self._power.put(PowerCommand(action))
