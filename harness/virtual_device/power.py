"""Power commands to a device's process: reboot, shut down, cut or restore the power."""

import asyncio
import contextlib
import enum
import os
from dataclasses import dataclass
from pathlib import Path

_MAX_READ = 4096


class WishKind(enum.Enum):
    """What to do."""

    REBOOT = "reboot"
    SHUTDOWN = "shutdown"
    POWER_CUT = "power cut"
    POWER_ON = "power on"


@dataclass(frozen=True, slots=True)
class Wish:
    """One wish.

    Attributes:
        off_s: how long the power is gone.
        unsynced_s: how far back changes to files are lost with it.
    """

    kind: WishKind
    off_s: float = 0.0
    unsynced_s: float = 0.0


class Wishes:
    """A queue of wishes. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Wish] = asyncio.Queue()

    def add(self, wish: Wish) -> None:
        """Wish for something; it is done in its turn."""
        self._queue.put_nowait(wish)

    async def next(self, timeout_s: float = float("inf")) -> Wish | None:
        """The next wish; `None` when there is none in that time."""
        if timeout_s == float("inf"):
            return await self._queue.get()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._queue.get(), timeout_s)
        return None


class RequestPipe:
    """A FIFO through which commands on the device ask for a reboot or a shutdown, a line each."""

    def __init__(self, path: Path, wishes: Wishes) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Open for writing too, so that it never ends and no writer has to wait for us.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wishes = wishes
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._descriptor, _MAX_READ).split(b"\n"):
                for kind in (WishKind.REBOOT, WishKind.SHUTDOWN):
                    if line == kind.value.encode():
                        self._wishes.add(Wish(kind))
