"""Helpers of the tests of virtual devices."""

import secrets
import subprocess
import time
from collections.abc import Callable

from harness.virtual_device.linux import all_processes, command_line, process_stat
from harness.virtual_device.protocol import Command, pack_header

Adb = Callable[..., subprocess.CompletedProcess[bytes]]
PATIENCE_S = 200


def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def new_marker() -> str:
    """A duration for `sleep` that no other process has."""
    return f"{secrets.randbelow(10**7)}.{secrets.randbelow(10**7)}"


def running(marker: str) -> list[int]:
    """Processes, anywhere on this machine, with `marker` as an argument."""
    marked = marker.encode()
    return [p.pid for p in all_processes() if p.alive and marked in command_line(p.pid)]


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    found = process_stat(pid)
    return found is not None and found.alive


def pack_message(command: Command, arg0: int, arg1: int, payload: bytes = b"") -> bytes:
    """A whole message of the ADB transport."""
    return pack_header(command, arg0, arg1, payload, with_checksum=True) + payload
