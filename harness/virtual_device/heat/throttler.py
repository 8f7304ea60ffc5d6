"""Throttler of a device's processes, without privileges: it stops them for a share of each 0.1 s.

That halves throughput as half the clock does, seen over seconds; within 0.1 s it is bursts. The
daemon itself (pushes, pulls) is not slowed, nor are processes with a terminal, whose shell would
report each stop.
"""

import asyncio
import signal

from harness.virtual_device.processes import RECENT_S, ProcessTable, send_signal

_PERIOD_S = 0.1


class Throttler:
    """Limits the processes of a device to the smallest of several shares of their time."""

    def __init__(self, processes: ProcessTable) -> None:
        self._processes = processes
        self._shares: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopped: set[int] = set()

    @property
    def share(self) -> float:
        """Share of time that processes get, up to 1."""
        return min(self._shares.values(), default=1.0)

    def limit(self, reason: str, share: float) -> None:
        """Set the share that `reason` allows."""
        self._shares[reason] = share
        if self.share < 1 and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def leave_stopped(self, pid: int) -> None:
        """Do not continue a process that was stopped for another reason."""
        self._stopped.discard(pid)

    async def _run(self) -> None:
        while self.share < 1:
            await self._processes.any_started()
            share = self.share
            try:
                self._stop()
                await asyncio.sleep(_PERIOD_S * (1 - share))
            finally:
                self._continue()
            await asyncio.sleep(_PERIOD_S * share)

    def _stop(self) -> None:
        for process in self._processes.all(RECENT_S):
            # A process that is already stopped was stopped for another reason.
            if process.alive and process.state != "T" and not process.terminal:
                send_signal(process.pid, signal.SIGSTOP)
                self._stopped.add(process.pid)

    def _continue(self) -> None:
        for pid in self._stopped:
            send_signal(pid, signal.SIGCONT)
        self._stopped.clear()
