"""Cancellation of parallel tasks: when one fails, the child processes of all are killed."""

import contextlib
import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from buildlib.errors import BuildError

if TYPE_CHECKING:
    import subprocess


class CancelScope:
    """Tasks that are cancelled together, with their running child processes.

    Each child process leads a process group of its own.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self.cancelled = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Kill all child processes with everything they started; later ones are killed too."""
        with self._lock:
            self.cancelled = True
            for child in self._running:
                _kill(child)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Make this the scope of child processes that the thread starts inside."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextlib.contextmanager
    def track(self, child: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Kill the child process if the scope is cancelled while it runs."""
        with self._lock:
            self._running.add(child)
            if self.cancelled:
                _kill(child)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(child)
        if self.cancelled and child.returncode == -signal.SIGKILL:
            raise _cancelled()


_CURRENT: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar("scope", default=None)


@contextlib.contextmanager
def track_child(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Track a child process in the scope of the calling task, if there is one."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    with scope.track(child):
        yield


def check_cancelled() -> None:
    """Check, before something long, that the tasks of this scope go on."""
    scope = _CURRENT.get()
    if scope is not None and scope.cancelled:
        raise _cancelled()


def _cancelled() -> BuildError:
    return BuildError("cancelled, because another part of the build failed or was interrupted")


def _kill(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
