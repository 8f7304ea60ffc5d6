"""Commands for a device's shell: their text, their output, and how they are ended."""

import re
import secrets
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Protocol

MARKS = "QNNFARM_MARKS"
"""Environment variable with the marks of a process; see `device_scripts/marked.sh`."""
_MOST_NOISE = 64 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Sink(Protocol):
    """Takes a stream as it comes."""

    def write(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take the next bytes, which are only valid during the call."""
        ...


def command_line(command: str | Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What to hand to the device's shell for a script, or for the words of one command.

    Raises:
        ValueError: a NUL, which no command can hold, or a bad variable name.
    """
    text = command if isinstance(command, str) else shlex.join(command)
    exports = []
    for name, value in (env or {}).items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        exports.append(f"export {name}={shlex.quote(value)}; ")
    line = "".join(exports) + text
    if "\0" in line:
        raise ValueError("a command cannot hold a NUL")
    return line


class BoundedOutput:
    """Keeps the beginning and the end of a stream, and counts what it left out between them."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take what the stream brought."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            self._trim()

    def _trim(self) -> None:
        excess = max(0, len(self._tail) - self._half)
        self.dropped += excess
        del self._tail[:excess]

    def text(self) -> str:
        """What was kept, as text; a line in the middle tells what was not."""
        self._trim()
        if not self.dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        note = f"\n[... {self.dropped} bytes left out ...]\n"
        return self._head.decode("utf-8", "replace") + note + self._tail.decode("utf-8", "replace")


class Tee:
    """A sink that keeps what it gets, and shows it to somebody as it comes."""

    def __init__(self, kept: BoundedOutput, on_output: Callable[[bytes], None]) -> None:
        self._kept = kept
        self._on_output = on_output

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep it, then show it."""
        self._kept.write(data)
        self._on_output(bytes(data))


class Job:
    """One run of a command line, which can be ended with everything that it started.

    Closing a connection ends a command on no transport for certain: adbd hangs up the shell alone,
    an OpenSSH server nothing. So a job's processes carry a mark; see `device_scripts/marked.sh`.

    Attributes:
        started: whether it has greeted, so that it runs on the device.
    """

    def __init__(
        self,
        line: str,
        env: Mapping[str, str] | None = None,
        *,
        keep_shell: bool = False,
        token: str | None = None,
    ) -> None:
        """Make a job of `line`.

        Args:
            keep_shell: leave a shell behind that reports the line's death by a signal as an exit
                status, where the transport reports no signals.
        """
        self.token = token or secrets.token_hex(8)
        self.started = False
        self._line = line
        self._env = dict(env or {})
        self._keep_shell = keep_shell

    @property
    def greeting(self) -> bytes:
        """What it writes first."""
        return f"qnnfarm-job {self.token}\n".encode()

    @property
    def script(self) -> str:
        """Script for the device's shell: greets, then runs the line under the job's mark."""
        marks = f'export {MARKS}="${MARKS} job:{self.token}"; '
        run = shlex.join(["sh", "-c", self._line])
        run = f"{run}\nexit $?" if self._keep_shell else f"exec {run}"
        return f"echo qnnfarm-job {self.token}; " + command_line(marks + run, self._env)

    @property
    def kill_script(self) -> str:
        """Script that kills all that is left of it; may be run again and again."""
        library = resources.files("device_scripts").joinpath("marked.sh").read_text()
        return f"{{\n{library}\nend_marked job:{self.token}\n}} 2>/dev/null"

    def strip_greeting(self, sink: Sink) -> "JobOutput":
        """Return a sink for the job's stdout that takes the greeting out."""
        return JobOutput(self, sink)


class JobOutput:
    """Stdout of a job, from its greeting on.

    What comes before the greeting was written by the start files of the user's shell, and is
    dropped; where no greeting comes, everything is passed on.
    """

    def __init__(self, job: Job, sink: Sink) -> None:
        self._job = job
        self._sink = sink
        self._begin: bytearray | None = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take what the stream brought."""
        if self._begin is None:
            self._sink.write(data)
            return
        greeting = self._job.greeting
        searched = max(0, len(self._begin) - len(greeting))
        self._begin += data
        place = self._begin.find(greeting, searched)
        if place >= 0:
            self._job.started = True
            del self._begin[: place + len(greeting)]
        elif len(self._begin) <= _MOST_NOISE:
            return
        self.close()

    def close(self) -> None:
        """Pass on what is still held back, as no greeting will come."""
        held, self._begin = self._begin, None
        if held:
            self._sink.write(bytes(held))


class Leftovers:
    """Jobs of a device that ended by an exception, until they are certainly killed. Thread-safe."""

    def __init__(self, kill: Callable[[Job, float], bool]) -> None:
        """`kill` kills a job within so many seconds, and returns whether that is certain."""
        self._kill = kill
        self._jobs: list[Job] = []
        self._lock = threading.Lock()

    def add(self, job: Job) -> None:
        """Have a job killed by the next `kill` that reaches the device."""
        with self._lock:
            self._jobs.append(job)

    def kill(self, timeout_s: float) -> None:
        """Kill all jobs, stopping at the first that cannot be; each may take `timeout_s`."""
        while job := self._pop():
            done = False
            try:
                done = self._kill(job, timeout_s)
            finally:
                if not done:
                    self.add(job)
            if not done:
                return

    def _pop(self) -> Job | None:
        with self._lock:
            return self._jobs.pop() if self._jobs else None
