"""Names of our actions on a device, which errors show in place of our command lines."""

import re
from types import MappingProxyType, TracebackType

from harness.errors import DeviceCommandError, DeviceLostError, DeviceTimeoutError

CLAIMING = "claiming its lease"
CHECKING = "checking its lease"
ENDING = "ending what ran there"
SCRIPTS = "checking its scripts"
PROBATION = "its probation run"
PROBING = "answering a probe"

_SCRIPT = re.compile(r"/([a-z]+)\.sh\b")
_SCRIPT_ACTIONS = MappingProxyType(
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


def describe_command(command: str, work_root: str) -> str:
    """Return the action of a command of ours; any other command as it is, in backticks."""
    if f"{work_root}/scripts/" not in command:
        return f"`{command}`"
    called = [name for name in _SCRIPT.findall(command) if name in _SCRIPT_ACTIONS]
    return _SCRIPT_ACTIONS[called[-1]] if called else SCRIPTS


class action_named:  # noqa: N801 - used like `contextlib.suppress`
    """Context manager that lets device errors name `action` in place of a command line.

    A class, so that tracebacks of tests end in the caller, not here or in `contextlib`.

    Args:
        failures: whether to name it also in the error of a command that failed.
    """

    def __init__(self, action: str, *, failures: bool = True) -> None:
        self._action = action
        self._failures = failures

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
        if isinstance(error, DeviceCommandError) and self._failures:
            raise DeviceCommandError(
                error.serial, self._action, error.exit_status, error.log_tail
            ) from error.__cause__
