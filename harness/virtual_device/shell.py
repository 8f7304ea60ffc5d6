"""`shell:`, `shell,v2:` and `exec:`: one command in a session of its own.

When the client goes away, or the device does, everything in that session is hung up and then
killed. A command that ends by itself leaves alone what it started in the background with other
descriptors, as on a phone.
"""

import asyncio
import contextlib
import fcntl
import os
import termios
from collections.abc import Callable
from dataclasses import dataclass

from harness.virtual_device.connection import Service
from harness.virtual_device.descriptors import ReadEnd, WriteEnd, output_pipe
from harness.virtual_device.injection import Activity, Injector
from harness.virtual_device.processes import Child, ProcessTable, exit_code
from harness.virtual_device.shell_protocol import (
    PacketKind,
    ShellRequest,
    pack_packet,
    parse_shell_service,
    parse_window_size,
    read_packet,
)
from harness.virtual_device.shell_text import starts
from harness.virtual_device.stream import ExactReader, Stream, StreamClosedError

_SHELL = "/bin/sh"
_TAKE_TERMINAL = 'exec <"$0" >"$0" 2>&1 && exec "$@"'
"""Opening a terminal makes it the controlling one of a session leader that has none."""
_END_OF_FILE = b"\x04"
_INPUT_GRACE_S = 10.0
"""How long a raw command may go on after the end of its input once its client is gone."""
_CANNOT_EXECUTE = 126
_RUN = "run.sh"
"""Our script that starts a runner."""
_MAX_DETAIL = 200


@dataclass(frozen=True, slots=True)
class ShellHost:
    """What shells need of their device.

    Attributes:
        before_command: called when a command is about to start.
    """

    processes: ProcessTable
    environment: Callable[[str], dict[str, str]]
    file_size_limit: Callable[[], int | None]
    faults: Injector
    before_command: Callable[[], None]


def open_shell(host: ShellHost, name: bytes) -> Service | None:
    """The service for a shell-like name; `None` if it is not one."""
    request = parse_shell_service(name)
    return None if request is None else _Shell(host, request).serve


class _Shell:
    def __init__(self, host: ShellHost, request: ShellRequest) -> None:
        self._host = host
        self._request = request
        self._outputs: list[tuple[PacketKind, ReadEnd]] = []
        self._input = WriteEnd(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        self._terminal: int | None = None
        self._activity: Activity | None = None

    async def serve(self, stream: Stream) -> None:
        command = self._request.command or b""
        kinds = ("shell", "run") if starts(command, _RUN) else ("shell",)
        detail = command[:_MAX_DETAIL].decode("utf-8", "replace")
        try:
            self._activity = await self._host.faults.begin(*kinds, detail=detail)
            await self._serve(stream)
        except StreamClosedError:
            pass
        finally:
            if self._activity is not None:
                self._activity.end()
            self._close()

    async def _serve(self, stream: Stream) -> None:
        self._host.before_command()
        try:
            child = self._start()
        except OSError as error:
            await self._refuse(stream, error)
            return
        if self._activity is not None:
            self._activity.pid = child.pid
        deliver = asyncio.create_task(self._deliver(stream, child))
        feed = asyncio.create_task(self._feed(stream))
        try:
            await asyncio.wait({deliver, feed}, return_when=asyncio.FIRST_COMPLETED)
            if not deliver.done() and not self._request.packets and not self._request.terminal:
                await asyncio.wait({deliver}, timeout=_INPUT_GRACE_S)
        finally:
            if not deliver.done() or deliver.exception() is not None:
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
        with contextlib.ExitStack() as theirs:
            child_in, our_in = os.pipe()
            theirs.callback(os.close, child_in)
            self._input.close()
            self._input = WriteEnd(our_in)
            our_out, child_out = output_pipe()
            theirs.callback(os.close, child_out)
            self._outputs.append((PacketKind.STDOUT, ReadEnd(our_out)))
            child_err = child_out
            if self._request.packets:
                our_err, child_err = output_pipe()
                theirs.callback(os.close, child_err)
                self._outputs.append((PacketKind.STDERR, ReadEnd(our_err)))
            return self._spawn(self._argv(), child_in, child_out, child_err)

    def _start_on_terminal(self) -> Child:
        master, slave = os.openpty()
        try:
            path = os.ttyname(slave)
            self._terminal = master
            self._outputs.append((PacketKind.STDOUT, ReadEnd(master)))
            self._input.close()
            self._input = WriteEnd(os.dup(master))
            argv: list[str | bytes] = [_SHELL, "-c", _TAKE_TERMINAL, path, *self._argv()]
            return self._spawn(argv, slave, slave, slave)
        finally:
            os.close(slave)

    async def _refuse(self, stream: Stream, error: OSError) -> None:
        text = f"cannot start a shell: {error.strerror}\n".encode()
        with contextlib.suppress(StreamClosedError):
            if self._request.packets:
                await stream.write(pack_packet(PacketKind.STDERR, text))
                await stream.write(pack_packet(PacketKind.EXIT, bytes([_CANNOT_EXECUTE])))
            else:
                await stream.write(text)

    async def _deliver(self, stream: Stream, child: Child) -> None:
        """Send all output, then the exit code."""
        async with asyncio.TaskGroup() as pumps:
            for kind, output in self._outputs:
                pumps.create_task(self._pump(stream, kind, output))
        status = await asyncio.shield(child.exited)
        await self._passed(0)
        if self._request.packets:
            await stream.write(pack_packet(PacketKind.EXIT, bytes([exit_code(status)])))

    async def _pump(self, stream: Stream, kind: PacketKind, output: ReadEnd) -> None:
        while data := await output.read():
            await self._passed(len(data))
            await stream.write(pack_packet(kind, data) if self._request.packets else data)

    async def _feed(self, stream: Stream) -> None:
        """Hand input to the command; returns when the client has closed the stream."""
        if not self._request.packets:
            while data := await stream.read():
                await self._passed(len(data))
                await self._input.write(data)
            self._input.close()
            return
        reader = ExactReader(stream)
        with contextlib.suppress(StreamClosedError):
            while True:
                await self._take(*await read_packet(reader))

    async def _take(self, kind: int, data: bytes) -> None:
        await self._passed(len(data))
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

    async def _passed(self, count: int) -> None:
        if self._activity is not None:
            await self._activity.passed(count)

    def _close(self) -> None:
        self._input.close()
        for _, output in self._outputs:
            output.close()
        self._outputs.clear()


async def _settle(*tasks: asyncio.Task[None]) -> None:
    """Cancel what still runs and let it end; the client's absence is no failure."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        failures = result.exceptions if isinstance(result, BaseExceptionGroup) else (result,)
        for failure in failures:
            if failure is not None and not isinstance(
                failure, asyncio.CancelledError | StreamClosedError
            ):
                raise failure
