"""Jobs that are to be killed, until it is certain that they were."""

import threading
from collections.abc import Callable

from harness.devices.job import Job


class Leftovers:
    """The jobs of one device that ended by an exception; several threads may share it."""

    def __init__(self, kill: Callable[[Job, float], bool]) -> None:
        """`kill` kills a job within so many seconds, and tells whether it is certain."""
        self._kill = kill
        self._jobs: list[Job] = []
        self._lock = threading.Lock()

    def add(self, job: Job) -> None:
        """Have a job killed by the next `kill` that reaches the device."""
        with self._lock:
            self._jobs.append(job)

    def kill(self, timeout_s: float) -> None:
        """Kill what is left, until one cannot be killed; each may take that long."""
        while job := self._next():
            done = False
            try:
                done = self._kill(job, timeout_s)
            finally:
                if not done:
                    self.add(job)
            if not done:
                return

    def _next(self) -> Job | None:
        with self._lock:
            return self._jobs.pop() if self._jobs else None
