"""Starting the process of a device and hearing that it is ready."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.errors import VirtualDeviceStartError
from harness.virtual_device.linux import all_processes, command_line, descendants
from harness.virtual_device.namespace import NamespaceKind

LOG_NAME = "daemon.log"

_DAEMON = "harness.virtual_device.daemon"
_TIMEOUT_S = 120.0
_KILL_PATIENCE_S = 5.0
_MAX_LOG_BYTES = 4 * 1024 * 1024
_TAIL_BYTES = 600


@dataclass(frozen=True, slots=True)
class Launched:
    """A device that listens."""

    pid: int
    port: int


def launch(name: str, folder: Path, kind: NamespaceKind) -> Launched:
    """Start the daemon for the record in `folder` and wait until it listens.

    Raises:
        VirtualDeviceStartError: it did not come up; nothing of it runs any more.
    """
    log_path = folder / LOG_NAME
    _shorten(log_path)
    ours, theirs = os.pipe()
    try:
        try:
            _spawn(folder, kind, theirs, log_path)
        finally:
            os.close(theirs)
        told = _listen(ours)
    except subprocess.TimeoutExpired:  # before it detached itself: it has been killed
        told = {}
    finally:
        os.close(ours)
    if "pid" in told and "port" in told:
        return Launched(told["pid"], told["port"])
    if "pid" in told:
        kill_tree(told["pid"])
    reason = "its process ended" if told.get("ended") else f"no answer within {_TIMEOUT_S:g} s"
    raise VirtualDeviceStartError(name, reason, _tail(log_path), str(log_path))


def kill_strays(folder: Path) -> None:
    """Kill processes that serve the device in `folder` though no record says so.

    They are left where whoever started them was killed at once, or the record was damaged since.
    """
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while strays := [p.pid for p in all_processes() if _serves(command_line(p.pid), folder)]:
        for pid in strays:
            kill_tree(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def kill_tree(pid: int) -> None:
    """Kill a process and all that descends from it, at once."""
    for victim in [pid, *(process.pid for process in descendants(pid))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _spawn(folder: Path, kind: NamespaceKind, ready: int, log_path: Path) -> None:
    command = [sys.executable, "-P", "-m", _DAEMON, str(folder)]
    command += ["--ready-fd", str(ready), "--namespace", kind.value]
    with log_path.open("ab") as log:
        # Returns when the daemon has detached itself.
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[ready],
            cwd="/",
            check=False,
            timeout=_TIMEOUT_S,
        )


def _listen(descriptor: int) -> dict[str, int]:
    """All that the daemon says until it is ready, ends (`ended`), or time is up."""
    deadline = time.monotonic() + _TIMEOUT_S
    told: dict[str, int] = {}
    received = b""
    while "port" not in told:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return told
        data = os.read(descriptor, 4096)
        if not data:
            return {**told, "ended": 1}
        received += data
        *lines, received = received.split(b"\n")
        for line in lines:
            told.update(json.loads(line))
    return told


def _serves(words: list[bytes], folder: Path) -> bool:
    mark = [_DAEMON.encode(), os.fsencode(folder)]
    return any(words[n : n + 2] == mark for n in range(len(words)))


def _shorten(log_path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log_path.stat().st_size > _MAX_LOG_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))


def _tail(log_path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return log_path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
    return ""
