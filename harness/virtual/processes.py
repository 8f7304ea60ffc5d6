"""The processes of a device: started in sessions of their own, and none left behind.

The daemon is the reaper of all its descendants (`PR_SET_CHILD_SUBREAPER`, or pid 1 of a pid
namespace), so that a process which daemonises itself stays below it and can be found.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.virtual.procfs import all_processes, descendants
from harness.virtual.syscalls import set_child_subreaper

log = logging.getLogger(__name__)

HANGUP_GRACE_S = 1.0
_KILL_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """A process that a service started, leader of its own session.

    Attributes:
        exited: its wait status (`os.WIFEXITED` and friends read it) once it is gone.
    """

    pid: int
    exited: asyncio.Future[int]


class ProcessTable:
    """Starts, reaps and kills. Belongs to one event loop, in the main thread."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        self._hangups: set[asyncio.Task[None]] = set()

    def install(self) -> None:
        """Become the reaper of all descendants from now on."""
        set_child_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        argv: Sequence[str | bytes],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str],
        folder: str,
        file_size_limit: int | None = None,
    ) -> Child:
        """Start a program in a new session; the three descriptors stay the caller's to close.

        Raises:
            OSError: it cannot be started.
        """
        with _file_size_limit(file_size_limit):
            process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=folder,
                start_new_session=True,
                restore_signals=True,
            )
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[process.pid] = (process, exited)
        return Child(process.pid, exited)

    def hang_up(self, child: Child) -> None:
        """SIGHUP, and a second later SIGKILL, to all in the child's session; does not wait."""
        task = asyncio.create_task(self._hang_up(child.pid))
        self._hangups.add(task)
        task.add_done_callback(self._hangups.discard)

    async def kill_all(self) -> None:
        """Kill every descendant and wait until all are reaped."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KILL_PATIENCE_S
        while True:
            left = descendants(os.getpid())
            for process in left:
                _send_signal(process.pid, signal.SIGKILL)
            self._reap()
            if not left:
                return
            if loop.time() > deadline:
                log.error("could not kill %s", [process.pid for process in left])
                return
            await asyncio.sleep(0.01)

    async def _hang_up(self, session: int) -> None:
        _signal_session(session, signal.SIGHUP)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HANGUP_GRACE_S
        while loop.time() < deadline:
            if not _session_lives(session):
                return
            await asyncio.sleep(0.05)
        _signal_session(session, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                process, exited = self._running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                if not exited.done():
                    exited.set_result(status)


@contextlib.contextmanager
def _file_size_limit(limit: int | None) -> Iterator[None]:
    """Processes started in the block may write no larger files.

    The limit is ours for that moment and theirs by inheritance: set from outside, it would come
    too late for what they fork first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def exit_code(status: int) -> int:
    """The exit code that a shell gives for a wait status: 128 + N for death by signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _session_lives(session: int) -> bool:
    return any(process.session == session and process.alive for process in all_processes())


def _signal_session(session: int, number: signal.Signals) -> None:
    for process in all_processes():
        if process.session == session:
            _send_signal(process.pid, number)


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
