"""Helpers of the tests of virtual devices."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable

from plugins.virtual_android.linux import ProcessStat, all_processes, command_line, process_stat
from plugins.virtual_android.protocol import AdbCommand, pack_header
from tests.waiting import wait_for

Adb = Callable[..., subprocess.CompletedProcess[bytes]]
RunAndLose = Callable[[str, str], None]


def new_marker() -> str:
    """A duration for `sleep` that no other process has."""
    return f"{secrets.randbelow(10**7)}.{secrets.randbelow(10**7)}"


def running(marker: str) -> list[int]:
    """Processes, anywhere on this machine, with `marker` as an argument."""
    marked = marker.encode()
    return [p.pid for p in all_processes() if p.alive and marked in command_line(p.pid)]


class Worker:
    """A process on a device that keeps a processor busy, with a marker as its argument.

    Args:
        shell: runs a command on the device.
    """

    def __init__(self, shell: Callable[[str], object]) -> None:
        marker = new_marker()
        shell(f"setsid yes {marker} </dev/null >/dev/null 2>&1 &")
        (self.pid,) = wait_for(lambda: running(marker))

    def speed(self) -> float:
        """Share of a processor that it gets, over two seconds."""
        began, before = time.monotonic(), self._stat().cpu_s
        time.sleep(2)
        return (self._stat().cpu_s - before) / (time.monotonic() - began)

    def is_stopped(self) -> bool:
        """Return whether it is stopped at one of many moments of a fifth of a second."""
        for _ in range(40):
            if self._stat().state == "T":
                return True
            time.sleep(0.005)
        return False

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _stat(self) -> ProcessStat:
        stat = process_stat(self.pid)
        assert stat is not None
        return stat


def pack_message(command: AdbCommand, arg0: int, arg1: int, payload: bytes = b"") -> bytes:
    """A whole message of the ADB transport."""
    return pack_header(command, arg0, arg1, payload, with_checksum=True) + payload
