"""A child process that answers requests in frames: native and foreign libraries run in one.

They abort the process on some errors, hang, or hold more memory than they give back. If the child
dies or is silent, a `RunnerDiedError` carries the end of its log.

A frame is a u32 length, that much JSON `{"arrays": [[name, dtype, shape], ...], ...}`, and the
arrays' bytes in order.
"""

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from buildlib.closeable import Closeable
from buildlib.error_base import one_line
from buildlib.errors import RunnerDiedError
from buildlib.toolchains.qnn.refusal import RefusedError

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

_TAIL_BYTES = 4096
_MAX_HEADER_BYTES = 16 << 20
_MAX_ARRAY_BYTES = 4 << 30
_LAUNCH = """
import runpy, sys
version, module, *paths = sys.argv[1:]
same = version == "{}.{}".format(*sys.version_info)
sys.path += paths if same else paths[:1]  # after its own; compiled modules fit one version
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_DTYPES = frozenset({"int32", "uint8", "uint16", "int8", "int16", "float32", "float16"})


class ChildProcess(Closeable):
    """A Python module in a process of its own, which `serve`s requests one at a time.

    Args:
        subject: its work, for errors.
        environment: variables beside those of this process.
        python: another interpreter than this one; it imports what it lacks from where this one
            does.
    """

    def __init__(
        self,
        module: str,
        subject: str,
        timeout_s: float,
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._child = subprocess.Popen(
            _command(python, module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | environment,
            start_new_session=True,
        )

    def request(self, header: dict[str, Any], arrays: "Arrays") -> "tuple[dict[str, Any], Arrays]":
        """Send a request and return the answer."""
        stdin, stdout = self._child.stdin, self._child.stdout
        if stdin is None or stdout is None or stdin.closed:
            raise RunnerDiedError(self._subject, "it was closed", "")
        try:
            write_frame(stdin.fileno(), header, arrays)
            answer, results = read_frame(stdout.fileno(), self._timeout_s)
        except (BrokenFrameError, OSError) as error:
            raise self._death_error(str(error)) from error
        if "error" in answer:
            raise RunnerDiedError(self._subject, str(answer["error"])[:300], "")
        return answer, results

    def close(self) -> None:
        """Kill the child: it has nothing to save, and its libraries may crash on a clean exit."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()

    def _death_error(self, reason: str) -> RunnerDiedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._child.wait(1.0)
            reason = f"{reason} (exit status {status})"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        tail = self._log.read().decode(errors="replace")
        self.close()
        return RunnerDiedError(self._subject, reason, tail)


def _command(python: str, module: str) -> list[str]:
    if python == sys.executable:
        return [python, "-P", "-m", module]
    root = str(Path(__file__).parents[2])
    version = "{}.{}".format(*sys.version_info)
    paths = [path for path in sys.path if path and path != root]
    return [python, "-P", "-c", _LAUNCH, version, module, root, *paths]


def serve(answer: "Callable[[dict[str, Any], Arrays], tuple[dict[str, Any], Arrays]]") -> NoReturn:
    """Answer the requests of a `ChildProcess` until it is gone.

    Frames arrive on stdin, and answers leave on the former stdout; output of the libraries goes to
    stderr.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    while True:
        try:
            header, arrays = read_frame(0)
        except BrokenFrameError:
            break
        results: Arrays = {}
        try:
            reply, results = answer(header, arrays)
        except Exception as error:  # noqa: BLE001  (the parent must learn of any error)
            reason = one_line(str(error)) or type(error).__name__
            reply = {"error": reason if isinstance(error, RefusedError) else f"{error!r}"[:300]}
        try:
            write_frame(answers, reply, results)
        except OSError:
            break
    os._exit(0)


class BrokenFrameError(Exception):
    """The other side is gone, silent for too long, or sends something else than a frame."""


def write_frame(fd: int, header: dict[str, Any], arrays: "Arrays") -> None:
    """Send a frame; blocks until the other side has taken it."""
    forms = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    text = json.dumps(header | {"arrays": forms}).encode()
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
        forms = [(str(n), str(d), tuple(int(s) for s in dims)) for n, d, dims in header["arrays"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFrameError("an unreadable header") from error
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, shape in forms:
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
            rest_s = deadline - time.monotonic()
            if rest_s <= 0 or not select.select([fd], [], [], rest_s)[0]:
                raise BrokenFrameError("no answer in time")
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise BrokenFrameError("it closed its end")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
