"""Messages between the host loop and the process that runs compiled graphs.

A frame is a u32 length, that much JSON `{"arrays": [[name, dtype, shape], ...], ...}`, and the
arrays' bytes in order.
"""

import json
import os
import select
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

_MAX_HEADER_BYTES = 16 << 20
_MAX_ARRAY_BYTES = 4 << 30
_DTYPES = frozenset({"int32", "uint8", "uint16", "int8", "int16", "float32", "float16"})


class BrokenFrameError(Exception):
    """The other side is gone, silent for too long, or sends something else than a frame."""


def write_frame(fd: int, header: dict[str, Any], arrays: "Arrays") -> None:
    """Send a frame; blocks until the other side has taken it."""
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    text = json.dumps(header | {"arrays": listed}).encode()
    _write(fd, struct.pack("<I", len(text)) + text)
    for array in arrays.values():
        _write(fd, np.ascontiguousarray(array).tobytes())


def read_frame(
    fd: int, timeout_s: float | None = None
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Receive a frame.

    Raises:
        BrokenFrameError: the pipe closed, the time is up, or the bytes make no sense.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = struct.unpack("<I", _read(fd, 4, deadline))
    if length > _MAX_HEADER_BYTES:
        raise BrokenFrameError(f"a header of {length} bytes")
    try:
        header = json.loads(_read(fd, length, deadline))
        listed = [(str(n), str(d), tuple(int(s) for s in dims)) for n, d, dims in header["arrays"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFrameError("an unreadable header") from error
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, shape in listed:
        if dtype not in _DTYPES or any(dim < 0 for dim in shape):
            raise BrokenFrameError(f"an array of type {dtype[:20]}")
        n_bytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        if n_bytes > _MAX_ARRAY_BYTES:
            raise BrokenFrameError(f"an array of {n_bytes} bytes")
        arrays[name] = np.frombuffer(_read(fd, n_bytes, deadline), dtype).reshape(shape)
    return header, arrays


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise BrokenFrameError("no answer in time")
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise BrokenFrameError("it closed its end")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
