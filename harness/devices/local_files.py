"""Files of this host that are sent to a device, or come from one."""

import os
import stat as stat_bits
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from buildlib.files import atomic_write
from harness.errors import HostFileError


def stat_local(path: Path) -> os.stat_result:
    """What a regular file is.

    Raises:
        HostFileError: it is none, or not there.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise HostFileError(str(path), _reason(error)) from None
    if not stat_bits.S_ISREG(stat.st_mode):
        raise HostFileError(str(path), "it is no regular file")
    return stat


def open_local(path: Path) -> BinaryIO:
    """A file to read, unbuffered.

    Raises:
        HostFileError: it cannot be read.
    """
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise HostFileError(str(path), _reason(error)) from None


@contextmanager
def receiving(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only at the end, and never by a link elsewhere.

    Raises:
        HostFileError: it cannot be written, there or in the block.
    """
    try:
        with atomic_write(path) as sink:
            yield sink
    except (OSError, ValueError) as error:
        raise HostFileError(str(path), _reason(error)) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
