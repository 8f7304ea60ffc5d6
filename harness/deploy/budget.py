"""One time limit for all the steps of something on a device."""

import time

from harness.errors import DeviceTimeoutError


class Budget:
    """What is left of `timeout_s`, for the timeouts of the single steps."""

    def __init__(self, serial: str, action: str, timeout_s: float) -> None:
        self._serial = serial
        self._action = action
        self._timeout_s = timeout_s
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Seconds left, more than 0.

        Raises:
            DeviceTimeoutError: none are left.
        """
        left = self._timeout_s - self.elapsed_s
        if left <= 0:
            raise DeviceTimeoutError(self._serial, self._action, self._timeout_s)
        return left
