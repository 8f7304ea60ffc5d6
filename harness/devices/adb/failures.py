"""From what an adb server or device answers to the error that says what happened."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.clock import DeadlineExceeded
from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import FailReply, ServerUnreachable, StreamClosed
from harness.errors import (
    AdbServerError,
    DeviceError,
    DeviceFullError,
    DeviceLostError,
    DevicePathError,
    DevicePermissionError,
    DeviceTimeoutError,
    DeviceTransferError,
    DeviceUnauthorizedError,
    HarnessError,
    NoDeviceError,
)

_LOST = re.compile(
    r"device '.*' not found|device not found|device offline|device still (connecting|authorizing)"
    r"|no devices/emulators found|^closed$|device is (being|in)|connection reset|protocol fault",
    re.IGNORECASE | re.DOTALL,
)
_UNKNOWN = re.compile(r"device '.*' not found", re.DOTALL)
_FULL = re.compile(r"no space left|disk quota exceeded|file too large", re.IGNORECASE)
_DENIED = re.compile(r"permission denied|operation not permitted|read-only file", re.IGNORECASE)
_PATH = re.compile(
    r"no such file|is a directory|not a directory|file name too long|too many.*links",
    re.IGNORECASE,
)
_LOG_TAIL = 4000


class Failures:
    """Turns the failures of one device's connections into errors of the harness."""

    def __init__(self, server: AdbServer, serial: str, shown: str) -> None:
        self._server = server
        self._serial = serial
        self._shown = shown
        self._seen = False

    @contextmanager
    def typed(
        self,
        action: str,
        timeout_s: float,
        log: Callable[[], str] | None = None,
        *,
        path: str | Callable[[], str] = "",
    ) -> Iterator[None]:
        """Raise what goes wrong inside as a `HarnessError`.

        `action` is what is done, `log` gives what it had written when it ended (and may fail
        with an `IndexError`), `path` is the file on the device that a refusal is about.
        """
        try:
            yield
            self._seen = True
        except ServerUnreachable as error:
            raise AdbServerError(self._server.shown, f"went away: {error}") from None
        except DeadlineExceeded:
            raise DeviceTimeoutError(self._shown, action, timeout_s, _tail(log)) from None
        except StreamClosed as error:
            raise self._closed(action, str(error)) from None
        except FailReply as error:
            where = path if isinstance(path, str) else path()
            raise self._refused(action, where, str(error)) from None

    def _closed(self, action: str, reason: str) -> HarnessError:
        """The connection ended: is it the server that died, or the device, or its adb daemon?"""
        state = self._server.state(self._serial)
        if state == "unauthorized":
            return DeviceUnauthorizedError(self._shown)
        now = f"; the adb server says now: {state}"
        return DeviceLostError(self._shown, action, reason + now)

    def _refused(self, action: str, path: str, reason: str) -> HarnessError:
        if reason.startswith("device unauthorized"):
            return DeviceUnauthorizedError(self._shown)
        if _UNKNOWN.search(reason) and not self._seen:
            return NoDeviceError(self._shown)
        if _LOST.search(reason):
            return DeviceLostError(self._shown, action, reason)
        if _FULL.search(reason):
            return DeviceFullError(self._shown, path, None, None)
        kind: type[DeviceTransferError] = DeviceTransferError
        if _DENIED.search(reason):
            kind = DevicePermissionError
        elif _PATH.search(reason):
            kind = DevicePathError
        error: DeviceError = kind(self._shown, path or action, reason)
        return error


def _tail(log: Callable[[], str] | None) -> str:
    try:
        return log()[-_LOG_TAIL:] if log else ""
    except IndexError:  # it ended before there was a log
        return ""
