"""Hashes of files: of this host's by the builder's memo, of a device's by its own `sha256sum`."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from buildlib.cache.file_hashes import FileDigest
from buildlib.cache.file_hashes import hash_files as hash_files_of_builder
from buildlib.errors import InputFileError
from harness.devices.base import Device
from harness.errors import HostFileError

__all__ = ["FileDigest", "hash_files", "hashes_on"]

_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")


def hash_files(paths: Iterable[Path], memo: Path | None = None) -> dict[Path, FileDigest]:
    """Return the digests of `paths`, from the memo where the file is what it was.

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
        DeviceLostError, DeviceTimeoutError: see `Device`.
    """
    command = f"cd {shlex.quote(folder)} 2>/dev/null && sha256sum {shlex.join(names)}"
    lines = device.shell(command, timeout_s=timeout_s, check=False).stdout.splitlines()
    return {match[2]: match[1] for match in map(_LINE.fullmatch, lines) if match}
