"""Waiting for every process below this one, on behalf of all devices that it serves."""

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from harness.virtual_device.family import Family
from harness.virtual_device.syscalls import set_child_subreaper

OnExit = Callable[[int, int, float], None]
"""Called with pid, wait status and the CPU seconds of the process and those it waited for."""

MARK_VARIABLE: Final = "QNNFARM_DEVICE"
"""Environment variable that tells a device's processes from those of others in one process."""

_THREADS = 16


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
