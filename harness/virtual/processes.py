"""The processes of a device: started in sessions of their own, and none left behind."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from harness.virtual.procfs import (
    ProcessStat,
    all_processes,
    descendants,
    has_variable,
)
from harness.virtual.reaper import Reaper

log = logging.getLogger(__name__)

HANGUP_GRACE_S = 1.0
MARK_VARIABLE: Final = "QNNFARM_DEVICE"
"""Environment variable that tells a device's processes from those of others in one process."""

_KILL_PATIENCE_S = 5.0
_LIMITED = 'ulimit -S -f "$0" && exec "$@"'
_ULIMIT_BLOCK = 512
_DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores and its children shall not."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that a service started, leader of its own session.

    Attributes:
        exited: its wait status (`os.WIFEXITED` and friends read it) once it is gone.
    """

    pid: int
    exited: asyncio.Future[int]


class ProcessTable:
    """Starts and kills the processes of one device. Belongs to one event loop.

    Args:
        mark: what `MARK_VARIABLE` says in all processes of the device, where other devices have
            processes below this one too; `None` where all descendants are the device's.
    """

    def __init__(self, reaper: Reaper, mark: str | None = None) -> None:
        self._reaper = reaper
        self._mark = mark
        self._running: dict[int, asyncio.Future[int]] = {}
        self._hangups: set[asyncio.Task[None]] = set()
        self._reaped_cpu_s = 0.0
        self._started = asyncio.Event()

    def spawn(
        self,
        argv: list[str | bytes],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str],
        file_size_limit: int | None = None,
    ) -> Child:
        """Start a program, `argv[0]` a path, in a new session and our working folder.

        The three descriptors stay the caller's to close; no other is inherited, because all of
        ours are closed on exec (PEP 446). `posix_spawn` copies no page tables, so the cost does
        not grow with this process.

        Raises:
            OSError: it cannot be started.
        """
        if self._mark is not None:
            environment = {**environment, MARK_VARIABLE: self._mark}
        if file_size_limit is not None:
            # A limit set on the child from outside would come too late for what it forks first.
            blocks = str(file_size_limit // _ULIMIT_BLOCK)
            argv = ["/bin/sh", "-c", _LIMITED, blocks, *argv]
        pid = os.posix_spawn(
            argv[0],
            argv,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, stdin, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULTED,
        )
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[pid] = exited
        self._reaper.watch(pid, self._on_exit)
        self._started.set()
        return Child(pid, exited)

    def mine(self) -> list[ProcessStat]:
        """All processes of the device, zombies included, parents before children."""
        if self._mark is not None and not self._started.is_set():
            return []
        found = descendants(os.getpid())
        if self._mark is not None:
            found = self._marked(found, f"{MARK_VARIABLE}={self._mark}".encode())
        if not found:
            self._started.clear()
        return found

    async def any_started(self) -> None:
        """Wait until the device may have processes."""
        await self._started.wait()

    def cpu_s(self, living: Iterable[ProcessStat]) -> float:
        """CPU time used on the device so far, given its living processes."""
        return self._reaped_cpu_s + sum(process.cpu_s for process in living)

    def hang_up(self, child: Child) -> None:
        """SIGHUP, and a second later SIGKILL, to all in the child's session; does not wait."""
        task = asyncio.create_task(self._hang_up(child.pid))
        self._hangups.add(task)
        task.add_done_callback(self._hangups.discard)

    async def kill_all(self) -> None:
        """Kill every process of the device and wait until all are reaped."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KILL_PATIENCE_S
        while True:
            left = self.mine()
            for process in left:
                send_signal(process.pid, signal.SIGKILL)
            self._reaper.reap()
            if not left:
                return
            if loop.time() > deadline:
                log.error("could not kill %s", [process.pid for process in left])
                return
            await asyncio.sleep(0.01)

    def _marked(self, found: list[ProcessStat], assignment: bytes) -> list[ProcessStat]:
        """Those that we started, or below, or with our mark: a daemon may have shed the first."""
        own: set[int] = set()
        for process in found:
            started = process.pid in self._running or process.parent in own
            if started or has_variable(process.pid, assignment):
                own.add(process.pid)
        return [process for process in found if process.pid in own]

    def _on_exit(self, pid: int, status: int, cpu_s: float) -> None:
        self._reaped_cpu_s += cpu_s
        exited = self._running.pop(pid)
        if not exited.done():
            exited.set_result(status)

    async def _hang_up(self, session: int) -> None:
        _signal_session(session, signal.SIGHUP)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HANGUP_GRACE_S
        while loop.time() < deadline:
            if not _session_lives(session):
                return
            await asyncio.sleep(0.05)
        _signal_session(session, signal.SIGKILL)


def exit_code(status: int) -> int:
    """The exit code that a shell gives for a wait status: 128 + N for death by signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _session_lives(session: int) -> bool:
    return any(process.session == session and process.alive for process in all_processes())


def _signal_session(session: int, number: signal.Signals) -> None:
    for process in all_processes():
        if process.session == session:
            send_signal(process.pid, number)
