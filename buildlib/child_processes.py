"""Child processes that end together: those of tasks that run at once, when one of them fails."""

import contextlib
import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from buildlib.errors import CancelledError

if TYPE_CHECKING:
    import subprocess


class Children:
    """Child processes that are running, each the leader of a process group of its own."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self.ended = False
        self._lock = threading.Lock()

    def end(self) -> None:
        """Kill all of them with everything they started; those that come later are killed too."""
        with self._lock:
            self.ended = True
            for child in self._running:
                _kill(child)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Children that this thread starts inside belong here."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextlib.contextmanager
    def tracking(self, child: "subprocess.Popen[bytes]") -> Iterator[None]:
        """The child belongs here as long as it runs.

        Raises:
            CancelledError: it was killed because another task failed or the user interrupted.
        """
        with self._lock:
            self._running.add(child)
            if self.ended:
                _kill(child)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(child)
        if self.ended and child.returncode == -signal.SIGKILL:
            raise CancelledError


_CURRENT: contextvars.ContextVar[Children | None] = contextvars.ContextVar("children", default=None)


@contextlib.contextmanager
def tracked(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """The child ends with the others of the task that started it, if any.

    Raises:
        CancelledError: it did.
    """
    children = _CURRENT.get()
    if children is None:
        yield
        return
    with children.tracking(child):
        yield


def check_cancelled() -> None:
    """Before something long: see that the other tasks of the one that this thread runs go on.

    Raises:
        CancelledError: one failed, or the user interrupted.
    """
    children = _CURRENT.get()
    if children is not None and children.ended:
        raise CancelledError


def _kill(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
