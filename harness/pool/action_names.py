"""Errors name what was done in words: what we say to a device is nobody's to read."""

import re
from types import MappingProxyType, TracebackType

from harness.errors import DeviceCommandError, DeviceLostError, DeviceTimeoutError

CLAIMING = "claiming its lease"
CHECKING = "checking its lease"
ENDING = "ending what ran there"
SCRIPTS = "checking its scripts"
PROBATION = "its probation run"

_SCRIPT = re.compile(r"/([a-z]+)\.sh\b")
_WHAT_SCRIPTS_DO = MappingProxyType(
    {
        "cleanup": "removing a run's files",
        "evict": "making room",
        "fence": CLAIMING,
        "link": "laying out a run",
        "prepare": "preparing it for a measurement",
        "run": "the run of a program",
        "setup": "preparing its work root",
        "telemetry": "reading its sensors",
        "verify": "checking its files",
    }
)


def in_words(command: str, work_root: str) -> str:
    """What a command of ours does; any other as it is, in backticks."""
    if f"{work_root}/scripts/" not in command:
        return f"`{command}`"
    called = [name for name in _SCRIPT.findall(command) if name in _WHAT_SCRIPTS_DO]
    return _WHAT_SCRIPTS_DO[called[-1]] if called else SCRIPTS


class renamed:  # noqa: N801  (read as a verb, like `contextlib.suppress`)
    """Errors of a command of ours that did not come to its end name `action` instead of it.

    One that failed keeps its name. A class, so that tracebacks of tests end with who called, not
    in here or in `contextlib`.
    """

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        if isinstance(error, DeviceTimeoutError):
            raise DeviceTimeoutError(
                error.serial, self._action, error.timeout_s, error.log_tail
            ) from error.__cause__
        if isinstance(error, DeviceLostError):
            raise DeviceLostError(error.serial, self._action, error.reason) from error.__cause__


class named(renamed):  # noqa: N801
    """The same, and for a command that failed."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        super().__exit__(kind, error, trace)
        if isinstance(error, DeviceCommandError):
            raise DeviceCommandError(
                error.serial, self._action, error.exit_status, error.log_tail
            ) from error.__cause__
