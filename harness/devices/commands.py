"""Commands as a device's shell takes them, and what is kept of what they write."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
