"""Processes of a device: started in sessions of their own, tracked, reaped, and none left behind.

Finding processes means reading all of `/proc`. Hundreds of devices in one process, each looking ten
times a second, share what one of them has read.
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
from typing import Final

from harness.virtual_device.linux import (
    ProcessStat,
    all_processes,
    command_line,
    descendants,
    environment_of,
    set_child_subreaper,
)

log = logging.getLogger(__name__)

OnExit = Callable[[int, int, float], None]
"""Called with pid, wait status and the CPU seconds of the process and those it waited for."""

MARK_VARIABLE: Final = "QNNFARM_DEVICE"
"""Environment variable that tells a device's processes from those of others in one process."""

_THREADS = 16

HANGUP_GRACE_S = 1.0
RECENT_S = 0.05
"""Age of what is good enough for those who look many times a second."""

_KILL_PATIENCE_S = 5.0
_SERVERS = b"harness.virtual_device."
_LIMITED = 'ulimit -S -f "$0" && exec "$@"'
_ULIMIT_BLOCK = 512
_DEFAULTED: Final[tuple[signal.Signals, ...]] = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores and its children shall not."""
_DEFAULTED_IF_LIMITED: Final[tuple[signal.Signals, ...]] = (signal.SIGPIPE,)
"""A full disk is an error of write(2) and does not kill."""


class Family:
    """Belongs to one event loop.

    A process is its owner's that was started for that owner, that is below one of those, or in
    whose environment the owner's mark is: a daemon may have shed the first two.

    Args:
        variable: the environment variable whose value is the mark.
    """

    def __init__(self, variable: str) -> None:
        self._prefix = f"{variable}=".encode()
        self._started: dict[int, str] = {}
        self._marks: dict[tuple[int, int], str] = {}
        self._seen: list[ProcessStat] = []
        self._owned: dict[str, list[ProcessStat]] = {}
        self._seen_at = float("-inf")
        self._ended: set[int] = set()

    def started(self, pid: int, owner: str) -> None:
        """A process was started for that owner, whose mark this is."""
        self._started[pid] = owner

    def ended(self, pid: int) -> None:
        """A process has been waited for."""
        self._started.pop(pid, None)
        self._ended.add(pid)

    def all(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        """All, zombies included, parents before children; as they were so long ago at most."""
        self._look(max_age_s)
        return [process for process in self._seen if process.pid not in self._ended]

    def of(self, owner: str, max_age_s: float = 0.0) -> list[ProcessStat]:
        """Those of one owner, as `all` gives them."""
        self._look(max_age_s)
        owned = self._owned.get(owner, [])
        return [process for process in owned if process.pid not in self._ended]

    def _look(self, max_age_s: float) -> None:
        now = time.monotonic()
        if now - self._seen_at < max_age_s:
            return
        self._seen, self._seen_at = descendants(os.getpid()), now
        self._ended.clear()
        owners: dict[int, str] = {}
        owned: dict[str, list[ProcessStat]] = defaultdict(list)
        marks: dict[tuple[int, int], str] = {}
        for process in self._seen:
            name = (process.pid, process.started)
            owner = self._started.get(process.pid) or owners.get(process.parent)
            owner = owner or self._marks.get(name) or self._mark(process.pid)
            if owner:
                owners[process.pid] = marks[name] = owner
                owned[owner].append(process)
        self._owned, self._marks = owned, marks

    def _mark(self, pid: int) -> str:
        for variable in environment_of(pid):
            if variable.startswith(self._prefix):
                return variable.removeprefix(self._prefix).decode("utf-8", "replace")
        return ""


def prepare_loop(reaper: "Reaper") -> None:
    """Make the running event loop one that devices can live in."""
    executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="disk")
    asyncio.get_running_loop().set_default_executor(executor)
    reaper.install()


class Reaper:
    """Reaps. Belongs to one event loop, in the main thread.

    Orphans become children of this process (`PR_SET_CHILD_SUBREAPER`, or pid 1 of a PID
    namespace), so that what daemonises itself stays below it and can be found.

    Attributes:
        family: all that it waits for.
    """

    def __init__(self) -> None:
        self.family = Family(MARK_VARIABLE)
        self._watched: dict[int, OnExit] = {}

    def install(self) -> None:
        """Become the reaper of all descendants from now on."""
        set_child_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def watch(self, pid: int, on_exit: OnExit) -> None:
        """Tell of the end of a child that was just started."""
        self._watched[pid] = on_exit

    def reap(self) -> None:
        """Take note of all that have ended."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.family.ended(pid)
            on_exit = self._watched.pop(pid, None)
            if on_exit is not None:
                on_exit(pid, status, usage.ru_utime + usage.ru_stime)


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
        serial_number: the device's; `MARK_VARIABLE` says it in all its processes, with our pid.
        alone: whether all that is below this process is the device's. Otherwise other devices
            have processes here too.
    """

    def __init__(self, reaper: Reaper, serial_number: str, *, alone: bool) -> None:
        self._reaper = reaper
        self._mark = f"{serial_number}-{os.getpid()}"
        self._alone = alone
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
        environment = {**environment, MARK_VARIABLE: self._mark}
        defaulted = _DEFAULTED
        if file_size_limit is not None:
            defaulted = _DEFAULTED_IF_LIMITED
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
            setsigdef=defaulted,
        )
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[pid] = exited
        self._reaper.family.started(pid, self._mark)
        self._reaper.watch(pid, self._on_exit)
        self._started.set()
        return Child(pid, exited)

    def mine(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        """All processes of the device, zombies included, parents before children.

        Args:
            max_age_s: how long ago they may have been seen.
        """
        if not self._alone and not self._started.is_set():
            return []
        found = self._look(max_age_s)
        if not found and not self._running:
            found = self._look() if max_age_s else found  # one may have come since
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
        await _kill(self.mine, self._reaper)

    def _look(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        family = self._reaper.family
        return family.all(max_age_s) if self._alone else family.of(self._mark, max_age_s)

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


async def kill_descendants(reaper: Reaper) -> None:
    """Kill all that is below this process, whosever it is, and wait until all are reaped."""
    await _kill(reaper.family.all, reaper)


def kill_leftovers(serial_numbers: Collection[str]) -> None:
    """Kill what devices have left whose process was killed itself, as if their power had gone."""
    marks = tuple(f"{MARK_VARIABLE}={number}-".encode() for number in serial_numbers)
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while left := [
        process.pid
        for process in all_processes()
        if process.alive and process.pid != os.getpid() and _is_leftover(process.pid, marks)
    ]:
        log.warning("killing what a device that was killed has left: %s", left)
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def exit_code(status: int) -> int:
    """The exit code that a shell gives for a wait status: 128 + N for death by signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


async def _kill(find: Callable[[], list[ProcessStat]], reaper: Reaper) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _KILL_PATIENCE_S
    while True:
        left = find()
        for process in left:
            send_signal(process.pid, signal.SIGKILL)
        reaper.reap()
        if not left:
            return
        if loop.time() > deadline:
            log.error("could not kill %s", [process.pid for process in left])
            return
        await asyncio.sleep(0.01)


def _is_leftover(pid: int, marks: tuple[bytes, ...]) -> bool:
    """Whether it bears one of the marks, and who served the device is gone.

    A copied folder has its device's serial number. Pid 1 is that of a PID namespace, which leaves
    nothing behind.
    """
    for variable in environment_of(pid):
        if variable.startswith(marks):
            server = variable.rpartition(b"-")[2]
            return server.isdigit() and server != b"1" and not _serves(int(server))
    return False


def _serves(pid: int) -> bool:
    return any(word.startswith(_SERVERS) for word in command_line(pid))


def _session_lives(session: int) -> bool:
    return any(process.session == session and process.alive for process in all_processes())


def _signal_session(session: int, number: signal.Signals) -> None:
    for process in all_processes():
        if process.session == session:
            send_signal(process.pid, number)
