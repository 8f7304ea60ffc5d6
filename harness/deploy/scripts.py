"""Our shell scripts on a device; they are what checks all else there.

They live in `WORK_ROOT/scripts/DIGEST`, so that hosts with different versions of them share a
device. Before each use they are hashed on the device by its own `sha256sum`.
"""

import hashlib
import re
import secrets
import shlex
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from harness.deploy.budget import Budget
from harness.devices.base import Device, PushItem
from harness.errors import DeploymentCorruptError, DeviceFullError

_HASH_LINE = re.compile(r"([0-9a-f]{64})  (\S+\.sh)")


@dataclass(frozen=True, slots=True)
class ScriptSet:
    """The scripts of this installation.

    Attributes:
        texts: name and content of each, sorted.
    """

    texts: tuple[tuple[str, bytes], ...]

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each by its name."""
        return {name: hashlib.sha256(text).hexdigest() for name, text in self.texts}

    @property
    def digest(self) -> str:
        """What names the folder on the device: it changes when any of them does."""
        lines = "".join(f"{sha256}  {name}\n" for name, sha256 in self.hashes.items())
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


@cache
def installed_scripts() -> ScriptSet:
    """All of `device_scripts/*.sh`."""
    folder = resources.files("device_scripts")
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".sh")]
    return ScriptSet(tuple(sorted((entry.name, entry.read_bytes()) for entry in found)))


def ensure_scripts(device: Device, budget: Budget) -> str:
    """The folder on the device that holds the scripts, after they have been brought there.

    Raises:
        DeploymentCorruptError: what arrived is not what was sent.
        DeviceError: the device failed otherwise.
    """
    scripts = installed_scripts()
    folder = f"{device.work_root}/scripts/{scripts.digest}"
    if not _wrong(device, folder, scripts, budget):
        return folder
    _push(device, folder, scripts, budget)
    wrong = _wrong(device, folder, scripts, budget)
    if wrong:
        name = wrong[0]
        raise DeploymentCorruptError(device.serial, name, scripts.hashes[name], "")
    return folder


def _wrong(device: Device, folder: str, scripts: ScriptSet, budget: Budget) -> list[str]:
    """Names of the scripts that `folder` lacks or has with another content."""
    command = f"cd {shlex.quote(folder)} 2>/dev/null && sha256sum *.sh"
    output = device.shell(command, timeout_s=budget.left(), check=False).stdout
    matches = filter(None, map(_HASH_LINE.fullmatch, output.splitlines()))
    found = {match[2]: match[1] for match in matches}
    return [name for name, sha256 in scripts.hashes.items() if found.get(name) != sha256]


def _push(device: Device, folder: str, scripts: ScriptSet, budget: Budget) -> None:
    # Each is moved into place by itself, so that a concurrent user never misses one.
    arriving = f"{device.work_root}/scripts/.{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as temporary:
        items = []
        for name, text in scripts.texts:
            local = Path(temporary) / name
            local.write_bytes(text)
            items.append(PushItem(local, f"{arriving}/{name}", 0o755))
        try:
            device.push_many(items, timeout_s=budget.left())
        except DeviceFullError:
            needed = sum(len(text) for _, text in scripts.texts)
            free = device.free_bytes(timeout_s=budget.left())
            raise DeviceFullError(device.serial, device.work_root, needed, free) from None
    new, final = shlex.quote(arriving), shlex.quote(folder)
    device.shell(
        f"mkdir -p {final} && mv -f {new}/*.sh {final}/ && rmdir {new}", timeout_s=budget.left()
    )
