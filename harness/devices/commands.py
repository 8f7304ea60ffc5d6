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
_MOST_DIGITS = 3
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Sink(Protocol):
    """Takes a stream as it comes."""

    def write(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take the next bytes, which are only valid during the call."""
        ...


def command_line(command: str | Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return the text for the device's shell of a script, or of the words of one command.

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
    """Keeps the beginning and the end of a stream, and counts the bytes left out between them."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream."""
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
        """Return the kept bytes as text; a line in the middle counts the others."""
        self._trim()
        if not self.dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        note = f"\n[... {self.dropped} bytes left out ...]\n"
        return self._head.decode("utf-8", "replace") + note + self._tail.decode("utf-8", "replace")


class Tee:
    """A sink that keeps output, and hands it on as it comes."""

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

    Neither does the end of a command end its output: adbd and OpenSSH servers wait for all
    processes that hold it. So a shell of ours stays behind, tells the line's exit status on both
    streams, also of a death by a signal, and is the last of the job to write there in order.

    Attributes:
        started: whether it has greeted, so that it runs on the device.
        status: the line's exit status, once it has ended and all that it wrote has come.
    """

    def __init__(self, line: str, env: Mapping[str, str] | None = None) -> None:
        self.token = secrets.token_hex(8)
        self.started = False
        self.status: int | None = None
        self._line = line
        self._env = dict(env or {})
        self._open = 0

    @property
    def greeting(self) -> bytes:
        """Line that it writes first."""
        return f"qnnfarm-job {self.token}\n".encode()

    @property
    def farewell(self) -> bytes:
        """Words that it writes last to each stream, before the exit status and a newline."""
        return f"qnnfarm-end {self.token} ".encode()

    @property
    def script(self) -> str:
        """Script for the device's shell: greets, runs the line under the job's mark, bids farewell.

        The shell's own messages, as that a line was killed, go nowhere.
        """
        marks = f'export {MARKS}="${MARKS} job:{self.token}"; '
        command = shlex.join(["sh", "-c", self._line])
        end = f'"qnnfarm-end {self.token} $qnnfarm_status"'
        command = (
            f"exec 3>&2 2>/dev/null; (exec {command} 2>&3 3>&-)\nqnnfarm_status=$?\n"
            f"echo {end}; echo {end} >&3; exit $qnnfarm_status"
        )
        return f"echo qnnfarm-job {self.token}; " + command_line(marks + command, self._env)

    @property
    def kill_script(self) -> str:
        """Script that greets and kills all that is left of it; may be run again and again."""
        return f"echo here; {{\n{_marked_library()}\nend_marked job:{self.token}\n}} 2>/dev/null"

    @property
    def list_script(self) -> str:
        """Script that prints a line `PID COMMAND` for each process that is left of it."""
        show = """printf '%s ' "$pid"; tr '\\0\\n' '  ' <"/proc/$pid/cmdline" | head -c 100; echo"""
        loop = f"for pid in $(marked_pids job:{self.token}); do {show}; done"
        return f"{{\n{_marked_library()}\n{loop}\n}} 2>/dev/null"

    def outputs(
        self, stdout: Sink, stderr: Sink, on_end: Callable[[], None]
    ) -> "tuple[JobOutput, JobOutput]":
        """Return sinks for the job's streams that take greeting and farewells out.

        `on_end` is called once its status is known.
        """
        self._open = 2

        def ended(status: int) -> None:
            self._open -= 1
            if not self._open:
                self.status = status
                on_end()

        return JobOutput(self, stdout, ended), JobOutput(self, stderr, ended, greeted=True)


def _marked_library() -> str:
    return resources.files("device_scripts").joinpath("marked.sh").read_text()


class JobOutput:
    """One stream of a job, from its greeting to its farewell, and later output of others.

    Output before the greeting comes from the start files of the user's shell, and is dropped;
    where no greeting comes, everything is passed on.
    """

    def __init__(
        self, job: Job, sink: Sink, on_end: Callable[[int], None], *, greeted: bool = False
    ) -> None:
        self._job = job
        self._sink = sink
        self._on_end = on_end
        self._begin: bytearray | None = None if greeted else bytearray()
        self._farewell = job.farewell
        self._held = b""
        self._ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream."""
        if self._begin is None:
            self._pass(bytes(data))
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
        begin, self._begin = bytes(self._begin), None
        self._pass(begin)

    def close(self) -> None:
        """Pass on the bytes that are still held back, as nothing more will come."""
        data = bytes(self._begin or b"") + self._held
        self._begin, self._held = None, b""
        self._give(data)

    def _pass(self, data: bytes) -> None:
        """Pass data on, but hold back an end that may be the beginning of the farewell."""
        data, self._held = self._held + data, b""
        if self._ended:
            self._give(data)
            return
        before, farewell, rest = data.partition(self._farewell)
        if not farewell:
            overlap = _overlap(data, self._farewell)
            self._held = data[len(data) - overlap :]
            self._give(data[: len(data) - overlap])
            return
        digits, newline, after = rest.partition(b"\n")
        if not newline and len(digits) <= _MOST_DIGITS:
            self._held = farewell + rest
            self._give(before)
            return
        self._ended = True
        if len(digits) > _MOST_DIGITS or not digits.isdigit():
            self._give(data)  # it is none
            return
        self._give(before + after)
        self._on_end(int(digits))

    def _give(self, data: bytes) -> None:
        if data:
            self._sink.write(data)


def _overlap(data: bytes, wanted: bytes) -> int:
    """Return the length of the longest end of `data` that `wanted` begins with."""
    longest = min(len(data), len(wanted) - 1)
    return next((n for n in range(longest, 0, -1) if data.endswith(wanted[:n])), 0)


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
            success = False
            try:
                success = self._kill(job, timeout_s)
            finally:
                if not success:
                    self.add(job)
            if not success:
                return

    def _pop(self) -> Job | None:
        with self._lock:
            return self._jobs.pop() if self._jobs else None
