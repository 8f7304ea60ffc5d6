"""Cancellation of a cell that runs in one thread, from another thread.

A thread that waits for a device cannot be interrupted. So its command is ended on the device, over
a connection of its own; the waiting call then returns, and the next step of the cell raises.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from harness.devices.base import Progress
from harness.devices.device import Device
from harness.errors import DeviceTimeoutError, HarnessError, LeaseLostError

_TRANSFERS = {"push", "push_many", "pull", "pull_many"}


class CellInterrupted(BaseException):
    """The whole run ends now. Not an `Exception`, so that a run is stored as interrupted."""


class CancelToken:
    """Cancels one try of a cell; one thread works, any other may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: Callable[[], BaseException] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._shield = threading.local()

    def check(self, *, overdue: bool = True) -> None:
        """Raise if the cell was cancelled: `CellInterrupted` or `DeviceTimeoutError`.

        Args:
            overdue: also if that was for the time it took.
        """
        if self._cause is None or getattr(self._shield, "is_on", False):
            return
        error = self._cause()
        if overdue or isinstance(error, CellInterrupted):
            raise error

    def interrupt(self) -> None:
        """Cancel the cell because the whole run ends; ends its commands on its device."""
        self._cancel(CellInterrupted)

    def expire(self, serial: str, action: str, timeout_s: float) -> None:
        """Cancel the cell because it took too long; ends its commands on its device."""
        self._cancel(lambda: DeviceTimeoutError(serial, action, timeout_s))

    @contextlib.contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback`, in the cancelling thread, if the cell is cancelled in this block."""
        with self._lock:
            self._callbacks.append(callback)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Let this thread finish a block, e.g. a clean-up, even if the cell is cancelled."""
        before = getattr(self._shield, "is_on", False)
        self._shield.is_on = True
        try:
            yield
        finally:
            self._shield.is_on = before

    def _cancel(self, cause: Callable[[], BaseException]) -> None:
        with self._lock:  # so that no clean-up begins before all is ended
            self._cause = self._cause or cause
            for callback in self._callbacks:
                with contextlib.suppress(HarnessError):
                    callback()


class _CancellableDevice:
    """A device that checks a token before and after every operation, also one that failed."""

    def __init__(self, device: Device, token: CancelToken) -> None:
        self._device = device
        self._token = token

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (it stands for all of `Device`)
        value = getattr(self._device, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def checked(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self._token.check()
            if name in _TRANSFERS:
                options["on_progress"] = self._check_progress(options.get("on_progress"))
            try:
                result = value(*arguments, **options)
            except HarnessError as error:
                # A cell whose device was taken away could not end in time.
                self._token.check(overdue=not isinstance(error, LeaseLostError))
                raise
            self._token.check()
            return result

        return checked

    def _check_progress(self, on_progress: Progress | None) -> Progress:
        """Check the token during a transfer, which nothing on the device could end."""

        def check(transferred: int) -> None:
            self._token.check()
            if on_progress is not None:
                on_progress(transferred)

        return check


def cancellable(device: Device, token: CancelToken) -> Device:
    """Wrap a device so that its operations raise once the token is cancelled."""
    return cast("Device", _CancellableDevice(device, token))
