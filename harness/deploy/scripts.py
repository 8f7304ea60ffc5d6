"""Our shell scripts on a device, which check all other files there.

They live in `WORK_ROOT/scripts/DIGEST`, so that hosts with different versions of them share a
device. Before each use they are hashed on the device, by a tool of its own. Errors show the names
of our actions in place of our command lines.
"""

import contextlib
import hashlib
import re
import secrets
import shlex
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType, TracebackType

from harness.clock import Deadline
from harness.deploy.digests import STEP_S, hash_command, hashes_on
from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceCommandError,
    DeviceFullError,
    DeviceLostError,
    DeviceTimeoutError,
    HarnessError,
)

_CLEAN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ScriptSet:
    """The scripts of this installation.

    Attributes:
        texts: name and content of each, sorted.
    """

    texts: tuple[tuple[str, bytes], ...]

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each by its name."""
        return {name: hashlib.sha256(text).hexdigest() for name, text in self.texts}

    @cached_property
    def digest(self) -> str:
        """Name of the folder on the device, which changes with any script."""
        lines = "".join(f"{sha256}  {name}\n" for name, sha256 in self.hashes.items())
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


@cache
def installed_scripts() -> ScriptSet:
    """Return all of `device_scripts/*.sh`."""
    folder = resources.files("device_scripts")
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".sh")]
    return ScriptSet(tuple(sorted((entry.name, entry.read_bytes()) for entry in entries)))


def scripts_folder(work_root: str) -> str:
    """Return the folder of the scripts on a device with that work root."""
    return f"{work_root}/scripts/{installed_scripts().digest}"


def intact(folder: str) -> str:
    """Return a condition for a device's shell: `folder` holds the scripts, each as we have it."""
    hashes = installed_scripts().hashes
    lines = "\n".join(f"{sha256}  {name}" for name, sha256 in hashes.items())
    output = f"$(exec 2>/dev/null; {hash_command(folder, hashes)})"
    return f'[ "{output}" = {shlex.quote(lines)} ]'


def ensure_scripts(device: Device, deadline: Deadline) -> str:
    """Push the scripts where they are missing or damaged, and return their folder on the device.

    Raises:
        DeploymentCorruptError: a script arrived with another content.
        DeviceUnsupportedError: the device cannot hash files.
    """
    scripts = installed_scripts()
    folder = scripts_folder(device.work_root)
    if not _wrong(device, folder, scripts, deadline):
        return folder
    _push(device, folder, scripts, deadline)
    wrong = _wrong(device, folder, scripts, deadline)
    if wrong:
        name = wrong[0]
        raise DeploymentCorruptError(device.serial, name, scripts.hashes[name], "")
    return folder


def _wrong(device: Device, folder: str, scripts: ScriptSet, deadline: Deadline) -> list[str]:
    """Return the names of the scripts that `folder` lacks or has with another content."""
    device_hashes = hashes_on(device, folder, scripts.hashes, timeout_s=deadline.at_most(STEP_S))
    return [name for name, sha256 in scripts.hashes.items() if device_hashes.get(name) != sha256]


def _push(device: Device, folder: str, scripts: ScriptSet, deadline: Deadline) -> None:
    # Each is moved into place by itself, so that a concurrent user never misses one. What an
    # interruption leaves lies where deployments clear old things away.
    arriving = f"{device.work_root}/incoming/scripts.{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as temporary:
        items = []
        for name, text in scripts.texts:
            local = Path(temporary) / name
            local.write_bytes(text)
            items.append(PushItem(local, f"{arriving}/{name}", 0o755))
        try:
            device.push_many(items, timeout_s=deadline.at_most(STEP_S))
        except HarnessError as error:
            with contextlib.suppress(HarnessError):
                device.shell(["rm", "-rf", arriving], timeout_s=_CLEAN_TIMEOUT_S, check=False)
            if not isinstance(error, DeviceFullError):
                raise
            needed = sum(len(text) for _, text in scripts.texts)
            free = device.free_bytes(timeout_s=deadline.at_most(STEP_S))
            raise DeviceFullError(device.serial, device.work_root, needed, free) from None
    new, final = shlex.quote(arriving), shlex.quote(folder)
    device.shell(
        f"mkdir -p {final} && mv -f {new}/*.sh {final}/ && rmdir {new}",
        timeout_s=deadline.at_most(STEP_S),
    )


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
