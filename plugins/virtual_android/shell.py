"""The `shell:`, `shell,v2:` and `exec:` services: one command in a session of its own.

When the client goes away, or the device does, everything in that session is hung up and then
killed. A command that ends by itself leaves its background processes alone, as on a phone, and does
not wait for those that hold its output.

Sources: AOSP packages/modules/adb, SERVICES.TXT (`shell[,arg1,arg2,...]:[command]`) and
`shell_protocol.h`: one byte of kind, four of little-endian length, data.
"""

import asyncio
import contextlib
import enum
import errno
import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass

from harness.errors import AdbProtocolError
from plugins.virtual_android.connection import Service
from plugins.virtual_android.injection import Activity, Injector
from plugins.virtual_android.processes import Child, ProcessTable, exit_code
from plugins.virtual_android.stream import ExactReader, Stream, StreamClosedError

_READ_SIZE = 256 * 1024
_PIPE_SIZE = 1024 * 1024

_PACKET = struct.Struct("<BI")
_MAX_PACKET = 1024 * 1024
_WINDOW = re.compile(rb"(\d{1,5})x(\d{1,5}),(\d{1,5})x(\d{1,5})\0?")
_TERM = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_SHELL = "/bin/sh"
_TAKE_TERMINAL = 'exec <"$0" >"$0" 2>&1 && exec "$@"'
"""Opening a terminal makes it the controlling one of a session leader that has none."""
_END_OF_FILE = b"\x04"
_INPUT_GRACE_S = 10.0
"""Seconds that a raw command may go on after the end of its input once its client is gone."""
_HELD_S = 0.5
"""Seconds that what a command left running may hold its output once it has ended."""
_CANNOT_EXECUTE = 126
_RUN = re.compile(rb"run\.sh['\"]{0,9} ")
_MAX_DETAIL = 200
_GARBAGE = 16 * 1024


def output_pipe() -> tuple[int, int]:
    """Make a large pipe for the output of a command: read end, write end."""
    read_end, write_end = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    return read_end, write_end


class ReadEnd:
    """The end of a pipe, or the master of a terminal, that this process reads. Owns it."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._left: int | None = None
        self._ready = asyncio.Event()

    async def read(self) -> bytes:
        """Read some bytes; empty at the end, which a terminal reports as EIO."""
        while self._left != 0:
            try:
                data = os.read(self._descriptor, min(_READ_SIZE, self._left or _READ_SIZE))
            except BlockingIOError:
                if self._left is not None:
                    break
                await _ready(self._descriptor, self._ready, for_writing=False)
                continue
            except OSError as error:
                if error.errno == errno.EIO:
                    break
                raise
            if self._left is not None:
                self._left -= len(data)
            return data
        return b""

    def finish(self) -> None:
        """End after the bytes that are in it now, though its other end may still be open."""
        count = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        self._left = int.from_bytes(count, sys.byteorder)
        self._ready.set()

    def close(self) -> None:
        """Close it, while no read is in progress."""
        os.close(self._descriptor)


class WriteEnd:
    """The end of a pipe, or the master of a terminal, that this process writes. Owns it.

    Args:
        descriptor: `None` for one that is closed from the start.
    """

    def __init__(self, descriptor: int | None) -> None:
        if descriptor is not None:
            os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`; without a reader it is dropped."""
        view = memoryview(data)
        while view and self._descriptor is not None:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await _ready(self._descriptor, asyncio.Event(), for_writing=True)
            except OSError:
                self.close()

    def close(self) -> None:
        """Close it; closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def _ready(descriptor: int, event: asyncio.Event, *, for_writing: bool) -> None:
    """Wait until a descriptor is ready, or somebody sets `event`."""
    loop = asyncio.get_running_loop()
    event.clear()
    add = loop.add_writer if for_writing else loop.add_reader
    remove = loop.remove_writer if for_writing else loop.remove_reader
    add(descriptor, event.set)
    try:
        await event.wait()
    finally:
        remove(descriptor)


class PacketKind(enum.IntEnum):
    """First byte of a packet."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3
    CLOSE_STDIN = 4
    WINDOW_SIZE = 5


@dataclass(frozen=True, slots=True)
class ShellRequest:
    """One command to run.

    Attributes:
        command: argument of `sh -c`; `None` for an interactive shell.
        packets: whether the stream carries `shell,v2` packets or raw bytes.
        terminal: whether the command runs on a pseudo-terminal.
    """

    command: bytes | None
    packets: bool
    terminal: bool
    term: str = "dumb"


def parse_shell_service(name: bytes) -> ShellRequest | None:
    """Read `shell:...`, `shell,v2,...:...` or `exec:...`; `None` for any other service."""
    head, colon, command = name.partition(b":")
    service, *options = head.decode("utf-8", "replace").split(",")
    if not colon or service not in {"shell", "exec"} or (service == "exec" and options):
        return None
    terminal = service == "shell" and not command
    term = "dumb"
    for option in options:
        if option in {"pty", "raw"}:
            terminal = option == "pty"
        elif option.startswith("TERM=") and _TERM.fullmatch(option[5:]):
            term = option[5:]
    return ShellRequest(command or None, "v2" in options, terminal, term)


def starts_runner(command: bytes) -> bool:
    """Check for a call of our script: `run.sh [OPTIONS] RUN_DIR TIMEOUT_S LOG -- ...`."""
    call = _RUN.search(command)
    end = command.find(b" -- ", call.end()) if call else -1
    if call is None or end < 0:
        return False
    arguments = command[call.end() : end].rsplit(b" ", 2)
    return len(arguments) == 3 and arguments[1].isdigit()


def pack_packet(kind: PacketKind, data: bytes | bytearray) -> bytes:
    """Pack one packet."""
    return _PACKET.pack(kind, len(data)) + data


async def read_packet(reader: ExactReader) -> tuple[int, bytes]:
    """Read the next packet of a client: its kind, perhaps unknown, and its data."""
    kind, length = _PACKET.unpack(await reader.exactly(_PACKET.size))
    if length > _MAX_PACKET:
        raise AdbProtocolError(f"shell packet of {length} bytes")
    return kind, await reader.exactly(length)


def parse_window_size(data: bytes) -> bytes | None:
    """Return a `struct winsize` from `ROWSxCOLUMNS,WIDTHxHEIGHT`; `None` for malformed data."""
    match = _WINDOW.fullmatch(data)
    if match is None:
        return None
    numbers = [int(number) for number in match.groups()]
    return struct.pack("@4H", *numbers) if max(numbers) <= 0xFFFF else None


@dataclass(frozen=True, slots=True)
class ShellHost:
    """Parts of a device that shells use.

    Attributes:
        before_command: called when a command is about to start.
    """

    processes: ProcessTable
    environment: Callable[[str], dict[str, str]]
    file_size_limit: Callable[[], int | None]
    faults: Injector
    before_command: Callable[[], None]


def open_shell(host: ShellHost, name: bytes) -> Service | None:
    """Return the service for `shell:` and `exec:` names; `None` for others."""
    request = parse_shell_service(name)
    if request is None:
        return None
    command = request.command or b""
    kinds = ("shell", "run") if starts_runner(command) else ("shell",)
    detail = command[:_MAX_DETAIL].decode("utf-8", "replace")

    async def serve(stream: Stream) -> None:
        with contextlib.suppress(StreamClosedError):
            async with host.faults.activity(*kinds, detail=detail) as activity:
                await _Shell(host, request, stream, activity).run()

    return serve


class _Shell:
    """One command and the stream of its client."""

    def __init__(
        self, host: ShellHost, request: ShellRequest, stream: Stream, activity: Activity
    ) -> None:
        self._host = host
        self._request = request
        self._stream = stream
        self._activity = activity
        self._outputs: list[tuple[PacketKind, ReadEnd]] = []
        self._input = WriteEnd(None)
        self._terminal: int | None = None

    async def run(self) -> None:
        self._host.before_command()
        try:
            try:
                child = self._start()
            except OSError as error:
                await self._refuse(error)
            else:
                await self._serve(child)
        finally:
            self._input.close()
            for _, output in self._outputs:
                output.close()

    async def _serve(self, child: Child) -> None:
        self._activity.pid = child.pid
        deliver = asyncio.create_task(self._deliver(child))
        feed = asyncio.create_task(self._feed())
        try:
            await asyncio.wait({deliver, feed}, return_when=asyncio.FIRST_COMPLETED)
            if not deliver.done() and not self._request.packets and not self._request.terminal:
                await asyncio.wait({deliver}, timeout=_INPUT_GRACE_S)
        finally:
            if not child.exited.done():
                self._host.processes.hang_up(child)
            await _settle(deliver, feed)

    def _start(self) -> Child:
        return self._start_on_terminal() if self._request.terminal else self._start_on_pipes()

    def _argv(self) -> list[str | bytes]:
        command = self._request.command
        return [_SHELL] if command is None else [_SHELL, "-c", command]

    def _spawn(self, argv: list[str | bytes], stdin: int, stdout: int, stderr: int) -> Child:
        return self._host.processes.spawn(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            environment=self._host.environment(self._request.term),
            file_size_limit=self._host.file_size_limit(),
        )

    def _start_on_pipes(self) -> Child:
        with contextlib.ExitStack() as after_start:
            child_in, our_in = os.pipe()
            after_start.callback(os.close, child_in)
            self._input = WriteEnd(our_in)
            our_out, child_out = output_pipe()
            after_start.callback(os.close, child_out)
            self._outputs.append((PacketKind.STDOUT, ReadEnd(our_out)))
            child_err = child_out
            if self._request.packets:
                our_err, child_err = output_pipe()
                after_start.callback(os.close, child_err)
                self._outputs.append((PacketKind.STDERR, ReadEnd(our_err)))
            return self._spawn(self._argv(), child_in, child_out, child_err)

    def _start_on_terminal(self) -> Child:
        master, slave = os.openpty()
        try:
            path = os.ttyname(slave)
            self._terminal = master
            self._outputs.append((PacketKind.STDOUT, ReadEnd(master)))
            self._input = WriteEnd(os.dup(master))
            argv: list[str | bytes] = [_SHELL, "-c", _TAKE_TERMINAL, path, *self._argv()]
            return self._spawn(argv, slave, slave, slave)
        finally:
            os.close(slave)

    async def _refuse(self, error: OSError) -> None:
        text = f"cannot start a shell: {error.strerror}\n".encode()
        if self._request.packets:
            await self._stream.write(pack_packet(PacketKind.STDERR, text))
            await self._stream.write(pack_packet(PacketKind.EXIT, bytes([_CANNOT_EXECUTE])))
        else:
            await self._stream.write(text)

    async def _deliver(self, child: Child) -> None:
        async with asyncio.TaskGroup() as group:
            pumps = [group.create_task(self._pump(*output)) for output in self._outputs]
            status = await asyncio.shield(child.exited)
            await asyncio.wait(pumps, timeout=_HELD_S)
            for pump, (_, output) in zip(pumps, self._outputs, strict=True):
                if not pump.done():
                    output.finish()
        await self._activity.transfer(0)
        if self._request.packets:
            packet = pack_packet(PacketKind.EXIT, bytes([exit_code(status)]))
            await self._stream.write(packet)

    async def _pump(self, kind: PacketKind, output: ReadEnd) -> None:
        command = (self._request.command or b"").decode("utf-8", "replace")
        garbage = self._activity.draw_babble(command) if kind is PacketKind.STDOUT else None
        count = 0
        while garbage is not None and count < garbage:
            data = os.urandom(int(min(_GARBAGE, garbage - count)))
            await self._send(kind, data)
            count += len(data)
        while data := await output.read():
            if garbage is None:
                await self._send(kind, data)

    async def _send(self, kind: PacketKind, data: bytes) -> None:
        await self._activity.transfer(len(data))
        await self._stream.write(pack_packet(kind, data) if self._request.packets else data)

    async def _feed(self) -> None:
        """Hand input to the command; returns when the client has closed the stream."""
        if not self._request.packets:
            while data := await self._stream.read():
                await self._activity.transfer(len(data))
                await self._input.write(data)
            self._input.close()
            return
        reader = ExactReader(self._stream)
        with contextlib.suppress(StreamClosedError):
            while True:
                await self._handle_packet(*await read_packet(reader))

    async def _handle_packet(self, kind: int, data: bytes) -> None:
        await self._activity.transfer(len(data))
        if kind == PacketKind.STDIN:
            await self._input.write(data)
        elif kind == PacketKind.CLOSE_STDIN:
            if self._terminal is None:
                self._input.close()
            else:
                await self._input.write(_END_OF_FILE)
        elif kind == PacketKind.WINDOW_SIZE and self._terminal is not None:
            size = parse_window_size(data)
            if size is not None:
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)


async def _settle(*tasks: asyncio.Task[None]) -> None:
    """Cancel unfinished tasks and wait for them; a client that went away is no failure."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        failures = result.exceptions if isinstance(result, BaseExceptionGroup) else (result,)
        for failure in failures:
            if failure is not None and not isinstance(
                failure, asyncio.CancelledError | StreamClosedError
            ):
                raise failure
