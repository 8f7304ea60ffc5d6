"""How a cell that works in one thread is ended from another.

A thread that waits for a device cannot be interrupted. So what runs on the device is ended there,
by a connection of its own; the waiting call then returns, and the next step of the cell raises.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from harness.devices.base import Device, Progress
from harness.errors import DeviceTimeoutError, HarnessError

_TRANSFERS = {"push", "push_many", "pull"}


class CellInterrupted(BaseException):
    """The run of the plan is to end now; no failure, so that a run is stored as interrupted."""


class Guard:
    """The end of one try of one cell, for one thread that works and any that cut it short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: Callable[[], BaseException] | None = None
        self._ends: list[Callable[[], None]] = []
        self._exempt = threading.local()

    def check(self) -> None:
        """Go on, unless the cell was cut short.

        Raises:
            CellInterrupted: the run of the plan is to end.
            DeviceTimeoutError: the cell took too long.
        """
        if self._cause is not None and not getattr(self._exempt, "set", False):
            raise self._cause()

    def interrupt(self) -> None:
        """Cut the cell short because the whole run ends. Ends what it runs on its device."""
        self._cut(CellInterrupted)

    def expire(self, serial: str, action: str, timeout_s: float) -> None:
        """Cut the cell short because it took too long. Ends what it runs on its device."""
        self._cut(lambda: DeviceTimeoutError(serial, action, timeout_s))

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `end` is what ends its work on the device; any thread calls it."""
        with self._lock:
            self._ends.append(end)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._ends.remove(end)

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """A block, such as a clean-up, that this thread finishes in any case."""
        before = getattr(self._exempt, "set", False)
        self._exempt.set = True
        try:
            yield
        finally:
            self._exempt.set = before

    def _cut(self, cause: Callable[[], BaseException]) -> None:
        with self._lock:  # so that no clean-up begins before all is ended
            self._cause = self._cause or cause
            for end in self._ends:
                with contextlib.suppress(HarnessError):
                    end()


class _GuardedDevice:
    """A device whose every operation first asks the guard, and asks again when it failed."""

    def __init__(self, device: Device, guard: Guard) -> None:
        self._device = device
        self._guard = guard

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (it stands for all of `Device`)
        value = getattr(self._device, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def guarded(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self._guard.check()
            if name in _TRANSFERS:
                options["on_progress"] = self._checking(options.get("on_progress"))
            try:
                result = value(*arguments, **options)
            except HarnessError:
                self._guard.check()
                raise
            self._guard.check()
            return result

        return guarded

    def _checking(self, on_progress: Progress | None) -> Progress:
        """Asks the guard in the middle of a transfer, which nothing on the device could end."""

        def check(transferred: int) -> None:
            self._guard.check()
            if on_progress is not None:
                on_progress(transferred)

        return check


def guarded(device: Device, guard: Guard) -> Device:
    """`device`, whose operations raise once the guard says that the cell is to end."""
    return cast("Device", _GuardedDevice(device, guard))
