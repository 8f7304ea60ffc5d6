"""What a device's process has open in the device's folder, which a namespace may hide."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from harness.virtual_device.control import open_control

SERVING_NAME = "serving.lock"

_PATIENCE_S = 10.0
"""For a process that is just ending."""


@dataclass(frozen=True, slots=True)
class Handles:
    """Belongs to the device, which closes it; whoever has it open is the only one to serve it.

    Attributes:
        folder: the folder itself, a descriptor.
        serving: a lock that ends with the process, however that ends.
    """

    control: socket.socket
    folder: int
    serving: int

    @classmethod
    def open(cls, folder: Path) -> "Handles":
        """Open them for the device in `folder`.

        Raises:
            OSError: they cannot be opened, or another process serves the device.
        """
        with contextlib.ExitStack() as stack:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            serving = os.open(folder / SERVING_NAME, flags, 0o600)
            stack.callback(os.close, serving)
            _lock(serving, folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            control = open_control(folder)
            stack.pop_all()
        return cls(control, descriptor, serving)

    def close(self) -> None:
        """Let another process serve the device."""
        self.control.close()
        os.close(self.folder)
        os.close(self.serving)


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                reason = "another process serves this device"
                raise OSError(errno.EBUSY, reason, str(folder)) from None
        else:
            return
        time.sleep(0.05)
