"""A child process that answers requests in frames: native and foreign libraries run in one.

They abort the process on some errors, hang, or hold more memory than they give back. If the child
dies or is silent, a `RunnerDiedError` carries the end of its log.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, NoReturn

from buildlib.closeable import Closeable
from buildlib.error_base import one_line
from buildlib.errors import RunnerDiedError
from buildlib.numerics.frames import BrokenFrameError, read_frame, write_frame
from buildlib.toolchains.child_process import RefusedError

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

_TAIL_BYTES = 4096


class ChildProcess(Closeable):
    """A Python module in a process of its own, which `serve`s requests one at a time.

    Args:
        module: to run.
        subject: what it runs, for errors.
        timeout_s: for each request.
        environment: variables beside those of this process.
    """

    def __init__(
        self, module: str, subject: str, timeout_s: float, environment: Mapping[str, str]
    ) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | environment,
            start_new_session=True,
        )

    def request(self, header: dict[str, Any], arrays: "Arrays") -> "tuple[dict[str, Any], Arrays]":
        """Send a request and return the answer.

        Raises:
            RunnerDiedError: the child refused, died, or took too long.
        """
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


def serve(answer: "Callable[[dict[str, Any], Arrays], tuple[dict[str, Any], Arrays]]") -> NoReturn:
    """Answer the requests of a `ChildProcess` until it is gone.

    Frames arrive on stdin, and answers leave on what was stdout; output of the libraries goes to
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
            said, results = answer(header, arrays)
        except Exception as error:  # noqa: BLE001  (the parent must learn of any error)
            reason = one_line(str(error)) or type(error).__name__
            said = {"error": reason if isinstance(error, RefusedError) else f"{error!r}"[:300]}
        try:
            write_frame(answers, said, results)
        except OSError:
            break
    os._exit(0)
