"""Throttler of a device's processes, without privileges: it stops them after each bit of work.

Work then takes as long as it would at a slower clock, seen over seconds; within 0.1 s it is bursts.
Work is CPU time, at most as much as time went by: waiting for something, or for a processor of a
busy host, goes on meanwhile, as on a phone. So a slow device is equally slow on a busy host, as
long as that gives it the time it needs. The daemon itself (pushes, pulls) is not slowed, nor are
processes with a terminal: a shell there would report each stop.
"""

import asyncio
import signal
from dataclasses import dataclass

from plugins.virtual_android.linux import ProcessStat
from plugins.virtual_android.processes import RECENT_S, ProcessTable, send_signal

_PERIOD_S = 0.1
_SHORTEST_RUN_S = 0.02
_SLACK_S = 0.03
"""Time by which CPU time may be late: the kernel counts it in ticks."""
_FRESH_S = 0.01
"""Age of process lists that tell how much a run of that length worked."""


@dataclass(slots=True)
class _Clock:
    """CPU time that processes used, against the time that a slower clock allows.

    Attributes:
        cpu_s: CPU time of the device at the last look.
        ran_s, worked_s: how long its processes were not stopped, and their CPU time in it, neither
            much greater than the other.
        ahead_s: how long they have to be stopped.
    """

    cpu_s: float
    ran_s: float = 0.0
    worked_s: float = 0.0
    ahead_s: float = 0.0

    def run(self, seconds: float, cpu_s: float, share: float) -> None:
        """Count a time in which processes ran."""
        before = min(self.ran_s, self.worked_s)
        self.ran_s += seconds
        self.worked_s += max(cpu_s - self.cpu_s, 0.0)
        self.cpu_s = max(cpu_s, self.cpu_s)
        work_s = min(self.ran_s, self.worked_s)
        self.ran_s = min(self.ran_s, work_s + _SLACK_S)
        self.worked_s = min(self.worked_s, work_s + _SLACK_S)
        needed = (work_s - before) / share
        self.ahead_s = max(self.ahead_s + needed - seconds, -_PERIOD_S)


class Throttler:
    """Limits the processes of a device to the smallest of several shares of the clock."""

    def __init__(self, processes: ProcessTable) -> None:
        self._processes = processes
        self._shares: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopped: set[int] = set()

    @property
    def share(self) -> float:
        """Share of the clock that processes get, up to 1."""
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
        time = asyncio.get_running_loop().time
        clock: _Clock | None = None
        while self.share < 1:
            await self._processes.any_started()
            began, share = time(), self.share
            await asyncio.sleep(max(_PERIOD_S * share, _SHORTEST_RUN_S))
            processes = self._processes.all(_FRESH_S)
            cpu_s = self._processes.cpu_s(processes)
            if clock is None or not processes:
                clock = _Clock(cpu_s)
                continue
            clock.run(time() - began, cpu_s, share)
            if clock.ahead_s > 0:
                clock.ahead_s -= await self._pause(clock.ahead_s, processes)

    async def _pause(self, seconds: float, processes: list[ProcessStat]) -> float:
        """Stop all processes for so long, also those that start meanwhile; return how long."""
        time = asyncio.get_running_loop().time
        began = time()
        try:
            self._stop(processes)
            while self.share < 1 and (left_s := began + seconds - time()) > 0:
                await asyncio.sleep(min(left_s, _PERIOD_S))
                if left_s > _PERIOD_S:
                    self._stop(self._processes.all(RECENT_S))
        finally:
            self._continue()
        return time() - began

    def _stop(self, processes: list[ProcessStat]) -> None:
        for process in processes:
            # A process that is already stopped was stopped for another reason.
            if process.alive and process.state != "T" and not process.terminal:
                send_signal(process.pid, signal.SIGSTOP)
                self._stopped.add(process.pid)

    def _continue(self) -> None:
        for pid in self._stopped:
            send_signal(pid, signal.SIGCONT)
        self._stopped.clear()
