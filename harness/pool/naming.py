"""Errors name what was done in words: what we say to a device is nobody's to read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

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


@contextmanager
def named(action: str) -> Iterator[None]:
    """Errors of commands of ours name `action` instead of the command."""
    with renamed(action):
        try:
            yield
        except DeviceCommandError as error:
            raise DeviceCommandError(
                error.serial, action, error.exit_status, error.log_tail
            ) from error.__cause__


@contextmanager
def renamed(action: str) -> Iterator[None]:
    """The same for a command that did not come to its end; one that failed keeps its name."""
    try:
        yield
    except DeviceTimeoutError as error:
        raise DeviceTimeoutError(
            error.serial, action, error.timeout_s, error.log_tail
        ) from error.__cause__
    except DeviceLostError as error:
        raise DeviceLostError(error.serial, action, error.reason) from error.__cause__
