"""Answers to STAT and LIST. These block on the disk and run outside the event loop."""

# ruff: noqa: PTH116, PTH118, PTH208 - pathlib drops the slash at the end that follows a link

import errno
import os

from harness.virtual_device.sync import wire


def stat_answer(ident: bytes, path: str) -> bytes:
    """STAT and LST2 describe a link, STA2 what it leads to."""
    found: os.stat_result | None = None
    error = 0
    try:
        found = os.stat(path) if ident == b"STA2" else os.lstat(path)
    except OSError as failed:
        error = failed.errno or errno.EIO
    return wire.stat_v1(ident, found) if ident == b"STAT" else wire.stat_v2(ident, found, error)


def list_answer(path: str, version: int) -> bytes:
    """All entries with `.` and `..`; none where the folder cannot be read, as adbd does."""
    answer = bytearray()
    try:
        names = [b".", b"..", *os.listdir(os.fsencode(path))]
    except OSError:
        names = []
    for name in names:
        found: os.stat_result | None = None
        error = 0
        try:
            found = os.lstat(os.path.join(os.fsencode(path), name))
        except OSError as failed:
            error = failed.errno or errno.EIO
        if found is not None or version > 1:
            answer += wire.entry(name, found, error, version=version)
    return bytes(answer + wire.end_of_list(version))
