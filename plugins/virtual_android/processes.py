"""Processes of a device: started in sessions of their own, tracked, reaped, and none left behind.

Finding processes means reading all of `/proc`. Hundreds of devices in one process, each looking ten
times a second, share one list.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plugins.virtual_android.linux import (
    ProcessStat,
    all_processes,
    descendants,
    environment_of,
    set_child_subreaper,
)

log = logging.getLogger(__name__)

MARK_VARIABLE: Final = "QNNFARM_DEVICE"
"""Environment variable of a device's daemon and of its processes; the value is its folder."""
RECENT_S = 0.05
"""Age of process lists that are good enough for callers that look many times a second."""

_HANGUP_GRACE_S = 1.0
_KILL_PATIENCE_S = 5.0
_DISK_THREADS = 16
_LIMITED = 'ulimit -S -f "$0" && exec "$@"'
_ULIMIT_BLOCK = 512
_DEFAULTED: Final[tuple[signal.Signals, ...]] = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores and its children shall not."""
_DEFAULTED_IF_LIMITED: Final[tuple[signal.Signals, ...]] = (signal.SIGPIPE,)
"""A full disk is an error of write(2) and does not kill."""

OnExit = Callable[[int, int, float], None]
"""Called with pid, wait status and the CPU seconds of the process and those it waited for."""


class ProcessTracker:
    """Reaps every process below this one, and knows which device each belongs to.

    Orphans become children of this process (`PR_SET_CHILD_SUBREAPER`, or pid 1 of a PID
    namespace), so daemons stay below it and can be found. A process belongs to the device that
    started it or one of its ancestors, or to the device of the folder in its environment: a daemon
    may have shed its ancestors. Belongs to one event loop, in the main thread.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Path, OnExit]] = {}
        self._folders: dict[tuple[int, int], Path] = {}
        self._descendants: list[ProcessStat] = []
        self._by_folder: dict[Path, list[ProcessStat]] = {}
        self._listed_at = float("-inf")
        self._reaped: set[int] = set()

    def install(self) -> None:
        """Reap all descendants from now on, in the running event loop, and give it disk threads."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="disk"))
        set_child_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def watch(self, pid: int, folder: Path, on_exit: OnExit) -> None:
        """Count a child that was just started as the device's in `folder`, until it exits."""
        self._watched[pid] = folder, on_exit

    def reap(self) -> None:
        """Wait for all children that have exited."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._reaped.add(pid)
            if watched := self._watched.pop(pid, None):
                watched[1](pid, status, usage.ru_utime + usage.ru_stime)

    def all(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        """Return all descendants, zombies included, parents before children.

        Args:
            max_age_s: accepted age of the list.
        """
        self._refresh(max_age_s)
        return [process for process in self._descendants if process.pid not in self._reaped]

    def of(self, folder: Path, max_age_s: float = 0.0) -> list[ProcessStat]:
        """Return those of the device in `folder`, like `all`."""
        self._refresh(max_age_s)
        own = self._by_folder.get(folder, [])
        return [process for process in own if process.pid not in self._reaped]

    async def kill(self, find: Callable[[], list[ProcessStat]]) -> None:
        """Kill the processes that `find` returns until it returns none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KILL_PATIENCE_S
        while processes := find():
            for process in processes:
                send_signal(process.pid, signal.SIGKILL)
            self.reap()
            if loop.time() > deadline:
                log.error("could not kill %s", [process.pid for process in processes])
                return
            await asyncio.sleep(0.01)
        self.reap()

    def _refresh(self, max_age_s: float) -> None:
        now = time.monotonic()
        if now - self._listed_at < max_age_s:
            return
        self._descendants, self._listed_at = descendants(os.getpid()), now
        self._reaped.clear()
        inherited: dict[int, Path] = {}
        by_folder: dict[Path, list[ProcessStat]] = defaultdict(list)
        folders: dict[tuple[int, int], Path] = {}
        for process in self._descendants:
            identity = (process.pid, process.started)
            watched = self._watched.get(process.pid)
            folder = watched[0] if watched else inherited.get(process.parent)
            folder = folder or self._folders.get(identity) or marked_folder(process.pid)
            if folder:
                inherited[process.pid] = folders[identity] = folder
                by_folder[folder].append(process)
        self._by_folder, self._folders = by_folder, folders


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
        folder: the device's; it marks the processes.
        exclusive: whether all descendants of this process are the device's. Otherwise other devices
            have processes here too.
    """

    def __init__(self, tracker: ProcessTracker, folder: Path, *, exclusive: bool) -> None:
        self._tracker = tracker
        self._folder = folder
        self._exclusive = exclusive
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
        """
        environment = {**environment, MARK_VARIABLE: str(self._folder)}
        defaulted = _DEFAULTED
        if file_size_limit is not None:
            defaulted = _DEFAULTED_IF_LIMITED
            # A limit set on the child from outside would come too late for its first forks.
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
            setsigdef=defaulted,
        )
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[pid] = exited
        self._tracker.watch(pid, self._folder, self._on_exit)
        self._started.set()
        return Child(pid, exited)

    def all(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        """Return all processes of the device, zombies included, parents before children.

        Args:
            max_age_s: accepted age of the list.
        """
        if not self._exclusive and not self._started.is_set():
            return []
        processes = self._find(max_age_s)
        if not processes and not self._running:
            processes = self._find() if max_age_s else processes  # one may have started since
            if not processes:
                self._started.clear()
        return processes

    async def any_started(self) -> None:
        """Wait until the device may have processes."""
        await self._started.wait()

    def cpu_s(self, living: Iterable[ProcessStat]) -> float:
        """Return the CPU time used on the device so far, given its living processes."""
        return self._reaped_cpu_s + sum(process.cpu_s for process in living)

    def hang_up(self, child: Child) -> None:
        """Send SIGHUP to the child's session, and SIGKILL after a second; does not wait."""
        task = asyncio.create_task(_hang_up(child.pid))
        self._hangups.add(task)
        task.add_done_callback(self._hangups.discard)

    async def kill_all(self) -> None:
        """Kill every process of the device and wait until all are reaped."""
        await self._tracker.kill(self.all)

    def _find(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        tracker = self._tracker
        return tracker.all(max_age_s) if self._exclusive else tracker.of(self._folder, max_age_s)

    def _on_exit(self, pid: int, status: int, cpu_s: float) -> None:
        self._reaped_cpu_s += cpu_s
        exited = self._running.pop(pid)
        if not exited.done():
            exited.set_result(status)


def kill_leftovers(folders: Collection[Path]) -> None:
    """Kill all processes that bear the mark of one of these devices, and their descendants.

    For devices that are not served now: their process was killed, or was started and never
    recorded, as if their power had gone.
    """
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while pids := [
        process.pid
        for process in all_processes()
        if process.alive and process.pid != os.getpid() and marked_folder(process.pid) in folders
    ]:
        log.warning("killing processes that a device left: %s", pids)
        for pid in pids:
            kill_tree(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    for victim in [pid, *(process.pid for process in descendants(pid))]:
        send_signal(victim, signal.SIGKILL)


def marked_folder(pid: int) -> Path | None:
    """Return the folder of the device that a process was started for, if it was for one."""
    prefix = f"{MARK_VARIABLE}=".encode()
    for variable in environment_of(pid):
        if variable.startswith(prefix):
            return Path(os.fsdecode(variable.removeprefix(prefix)))
    return None


def exit_code(status: int) -> int:
    """Return the exit code that a shell gives for a wait status: 128 + N for death by signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


async def _hang_up(session: int) -> None:
    _signal_session(session, signal.SIGHUP)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _HANGUP_GRACE_S
    while loop.time() < deadline:
        if not any(process.session == session and process.alive for process in all_processes()):
            return
        await asyncio.sleep(0.05)
    _signal_session(session, signal.SIGKILL)


def _signal_session(session: int, number: signal.Signals) -> None:
    for process in all_processes():
        if process.session == session:
            send_signal(process.pid, number)
