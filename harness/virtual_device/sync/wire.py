"""Structures of the sync protocol, versions 1 and 2. All little-endian."""

import os
import struct

MAX_PATH = 1024
MAX_DATA = 64 * 1024

REQUEST = struct.Struct("<4sI")
"""id, length of the path that follows; also id and length of DATA, or id and mtime of DONE."""
SEND_SETUP = struct.Struct("<4sII")
"""SND2: id, mode, flags."""
RECV_SETUP = struct.Struct("<4sI")
"""RCV2: id, flags."""
DATA_HEADER = REQUEST

_STAT_V1 = struct.Struct("<4sIII")
_STAT_V2 = struct.Struct("<4sIQQIIIIQqqq")
_NAME_LENGTH = struct.Struct("<I")
_LOW = 0xFFFFFFFF
_V1_ENTRY_SIZE = _STAT_V1.size + _NAME_LENGTH.size
_V2_ENTRY_SIZE = _STAT_V2.size + _NAME_LENGTH.size


def stat_v1(ident: bytes, found: os.stat_result | None) -> bytes:
    """STAT: all zero for what does not exist, sizes and times cut to 32 bits."""
    if found is None:
        return _STAT_V1.pack(ident, 0, 0, 0)
    return _STAT_V1.pack(ident, found.st_mode, found.st_size & _LOW, int(found.st_mtime) & _LOW)


def stat_v2(ident: bytes, found: os.stat_result | None, error: int = 0) -> bytes:
    """STA2 and LST2: `error` is an errno of Linux."""
    if found is None:
        return _STAT_V2.pack(ident, error, *[0] * 10)
    return _STAT_V2.pack(
        ident,
        0,
        found.st_dev,
        found.st_ino,
        found.st_mode,
        found.st_nlink & _LOW,
        found.st_uid,
        found.st_gid,
        found.st_size,
        int(found.st_atime),
        int(found.st_mtime),
        int(found.st_ctime),
    )


def entry(name: bytes, found: os.stat_result | None, error: int, *, version: int) -> bytes:
    """One line of a listing."""
    head = stat_v1(b"DENT", found) if version == 1 else stat_v2(b"DNT2", found, error)
    return head + _NAME_LENGTH.pack(len(name)) + name


def end_of_list(version: int) -> bytes:
    """DONE in the size of an entry."""
    size = _V1_ENTRY_SIZE if version == 1 else _V2_ENTRY_SIZE
    return b"DONE".ljust(size, b"\0")


def failure(text: str) -> bytes:
    """FAIL with a text for the user."""
    data = text.encode("utf-8", "replace")[:MAX_DATA]
    return REQUEST.pack(b"FAIL", len(data)) + data


SUCCESS = REQUEST.pack(b"OKAY", 0)
