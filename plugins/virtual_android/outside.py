"""A device's needs from the host while it runs: the user's adb keys, its event log, its log.

An unconfined device reads and writes them itself. A confined one sees none of these files; the
process that started it stays outside, and does both on its behalf (`supervise`).
"""

import contextlib
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers

from plugins.virtual_android.auth import load_keys, user_key_files
from plugins.virtual_android.events import EventFile

_MAX_MESSAGE = 128 * 1024
_KEYS = b"keys"
_DONE = b"done"
_MAX_LOG_BYTES = 4 * 1024 * 1024
_KEPT_LOG_BYTES = _MAX_LOG_BYTES // 2


class Outside(Protocol):
    """Files of the host that a device reads and writes while it runs."""

    def accepted_keys(self) -> list[RSAPublicKey]:
        """Read the adb keys that may connect."""

    def write_event(self, line: bytes) -> None:
        """Append a line to the event log."""


class DirectOutside:
    """Reads and writes the files itself.

    Args:
        folder: the device's.
        environment: names the adb keys of its user.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._key_files = user_key_files(environment, Path.home())
        self._events = EventFile(folder)
        self.write_event = self._events.write

    def accepted_keys(self) -> list[RSAPublicKey]:
        """Read the adb keys that may connect."""
        keys, remarks = load_keys(self._key_files)
        for line in remarks:
            logging.getLogger(__name__).warning("key left out: %s", line)
        return keys

    def close(self) -> None:
        """Close the event log."""
        self._events.close()


@dataclass(frozen=True, slots=True)
class SupervisedOutside:
    """A confined device's way to the process outside that supervises it."""

    connection: socket.socket

    def accepted_keys(self) -> list[RSAPublicKey]:
        """Ask for the adb keys that may connect."""
        self.connection.send(_KEYS)
        answer = json.loads(self.connection.recv(_MAX_MESSAGE))
        return [RSAPublicNumbers(exponent, int(n, 16)).public_key() for exponent, n in answer]

    def write_event(self, line: bytes) -> None:
        """Append a line to the event log."""
        self.connection.send(line)
        self.connection.recv(_MAX_MESSAGE)  # by then it is readable


def supervise(pid: int, connection: socket.socket, log: int, files: DirectOutside) -> int:
    """Serve a confined device until it exits, and return its exit status.

    Args:
        pid: its process; SIGTERM and SIGINT are passed on to it.
        connection: our end of the one in its `SupervisedOutside`.
        log: our end of the pipe that it logs to.
    """

    def forward(number: int, _frame: object) -> None:
        os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    threads = [
        threading.Thread(target=_answer, args=(connection, files), daemon=True),
        threading.Thread(target=_copy_log, args=(log,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    _, status = os.waitpid(pid, 0)
    for thread in threads:
        thread.join()
    return os.waitstatus_to_exitcode(status) & 0xFF


def _answer(connection: socket.socket, files: DirectOutside) -> None:
    with contextlib.suppress(ConnectionError):
        while message := connection.recv(_MAX_MESSAGE):
            if message == _KEYS:
                numbers = [key.public_numbers() for key in files.accepted_keys()]
                connection.send(json.dumps([(n.e, f"{n.n:x}") for n in numbers]).encode())
            else:
                with contextlib.suppress(OSError):  # a full disk loses events
                    files.write_event(message)
                connection.send(_DONE)


def _copy_log(pipe: int) -> None:
    while part := os.read(pipe, 64 * 1024):
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), part)
            _shorten(sys.stderr.fileno())


def set_up_logging(level: int) -> None:
    """Log to standard error, and keep only the last megabytes of it."""
    handler = BoundedHandler(sys.stderr)
    text = "%(asctime)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=text, handlers=[handler])


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no parameter at run time
    """Handler for a file opened for appending; drops its older half when it is too large."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        super().emit(record)
        try:
            _shorten(self.stream.fileno())
        except OSError:
            self.handleError(record)


def _shorten(descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= _MAX_LOG_BYTES:
        return
    # It is open for writing only.
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # noqa: PTH123 - no path
        file.seek(-_KEPT_LOG_BYTES, os.SEEK_END)
        tail = file.read()
    os.ftruncate(descriptor, 0)
    os.write(descriptor, tail[tail.find(b"\n") + 1 :])
