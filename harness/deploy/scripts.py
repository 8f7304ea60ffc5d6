"""Our shell scripts on a device, which check all other files there.

They live in `WORK_ROOT/scripts/DIGEST`, so that hosts with different versions of them share a
device. Before each use they are hashed on the device, by a tool of its own.
"""

import contextlib
import hashlib
import secrets
import shlex
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

from harness.clock import Deadline
from harness.deploy.digests import STEP_S, hash_command, hashes_on
from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import DeploymentCorruptError, DeviceFullError, HarnessError

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
