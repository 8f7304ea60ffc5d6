"""Hashes of files: of this host's by the builder's memo, of a device's by a tool of its own."""

import re
import shlex
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path

from buildlib.cache.file_hashes import FileDigest
from buildlib.cache.file_hashes import hash_files as hash_files_of_builder
from buildlib.errors import InputFileError
from harness.devices.device import Device
from harness.errors import DeviceUnsupportedError, HostFileError

__all__ = ["STEP_S", "FileDigest", "hash_command", "hash_files", "hashes_on", "hashing_s"]

_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_NO_TOOL = 127
STEP_S = 60.0
"""Time that a device has for a step of a deployment which reads no large files."""
_SLOWEST_BYTES_PER_S = 5_000_000
"""Speed at which the slowest device, with files on an SD card, still hashes."""


def hash_files(paths: Iterable[Path], memo: Path | None = None) -> dict[Path, FileDigest]:
    """Return the digests of `paths`, those of unchanged files from the memo.

    Raises:
        HostFileError: a file is missing, unreadable or not regular, or changed meanwhile.
    """
    try:
        return hash_files_of_builder(paths, memo)
    except InputFileError as error:
        raise HostFileError(error.path, error.reason) from None


def hashes_on(
    device: Device, folder: str, names: Iterable[str], *, timeout_s: float
) -> dict[str, str]:
    """Compute the SHA-256 of files in a folder on a device, by name; without unreadable ones.

    Args:
        names: plain ones, without white space.

    Raises:
        DeviceUnsupportedError: the device has no tool for it.
        DeviceLostError, DeviceTimeoutError: see `Device`.
    """
    result = device.shell(hash_command(folder, names), timeout_s=timeout_s, check=False)
    if result.exit_status == _NO_TOOL:
        reason = "it has no sha256sum or toybox: install one of them"
        raise DeviceUnsupportedError(device.serial, "checking the files that arrived", reason)
    matches = filter(None, map(_LINE.fullmatch, result.stdout.splitlines()))
    return {match[2]: match[1] for match in matches}


def hashing_s(contents: Iterable[FileDigest]) -> float:
    """Return the time in seconds that a device has to hash files."""
    return STEP_S + sum(digest.size for digest in contents) / _SLOWEST_BYTES_PER_S


def hash_command(folder: str, names: Iterable[str]) -> str:
    """Return a command for a device's shell that prints `SHA256  NAME` for files in a folder."""
    return f"{_functions()}cd {shlex.quote(folder)} 2>/dev/null && sha256 {shlex.join(names)}"


@cache
def _functions() -> str:
    return resources.files("device_scripts").joinpath("sha256.sh").read_text("utf-8")
