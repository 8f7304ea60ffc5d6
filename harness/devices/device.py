"""Devices that run a POSIX shell, and the transports by which commands and files reach them."""

import contextlib
import posixpath
import re
import shlex
import stat as stat_bits
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import (
    CommandResult,
    DeviceProperties,
    FailReply,
    Progress,
    PullItem,
    PushItem,
    ServerUnreachable,
)
from harness.devices.commands import BoundedOutput, Job, Leftovers, Sink, Tee, command_line
from harness.devices.files import receiving, stat_local
from harness.devices.forward import Forward
from harness.devices.properties import DF, parse_df
from harness.errors import (
    DeviceCommandError,
    DeviceLostError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
    HarnessError,
    HostAuthError,
    NoDeviceError,
    one_line,
)

_LOG_TAIL = 4000
_MAX_OUTPUT = 4 << 20
_KILL_TIMEOUT_S = 5.0
_SILENT_S = 10.0
"""Time that a device has to answer at all, before a command, after one that got no answer."""
_HELD_S = 0.3
"""Seconds that the end of a command that has ended may take, before something must hold it."""
_MOST_LISTED = 4096
_REBOOT_POLL_S = 0.5
_ASK_TIMEOUT_S = 10.0
_FIND_TIMEOUT_S = 30.0
_BOOT_ID = re.compile(r"[\x21-\x7e]{1,100}")
_BOOT_ID_SCRIPT = (
    "cat ${QNNFARM_BOOT_ID:-/proc/sys/kernel/random/boot_id} 2>/dev/null || "
    "getprop ro.boottime.init 2>/dev/null"
)
_NOT_YET = (
    DeviceCommandError,
    DeviceLostError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
    HostAuthError,  # a Linux machine lets only root in until it has come up
    NoDeviceError,
    DeadlineExceeded,
)
_FORWARD = re.compile(r"tcp:([0-9]{1,5})")


class Transport(Protocol):
    """Way to one device, and operations that differ with its system. Thread-safe.

    Methods that take a device ask it by commands, which are not guarded.

    Attributes:
        serial: the name by which the device is addressed.
        type: its device type.
    """

    serial: str
    type: str

    def execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        """Run a script in a process group of its own; gives its exit status.

        Raises exceptions of the way itself (sockets, SSH), which `typed` translates.
        """
        ...

    def typed(
        self, action: str, timeout_s: float, log: Callable[[], str] | None = None
    ) -> AbstractContextManager[None]:
        """Turn exceptions of the way itself into errors of the harness.

        Args:
            action: the purpose of the block, for the error.
            timeout_s: its time limit, for the error.
            log: returns the end of a command's output.
        """
        ...

    def send(
        self,
        action: str,
        items: Sequence[PushItem],
        *,
        mtime: int,
        check: bool,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Send regular files, all with that `mtime`; gives the bytes sent.

        `check` has the size of each compared on the device, where that takes a question of its own.
        """
        ...

    def receive(
        self,
        action: str,
        remotes: Sequence[str],
        sinks: Iterable[AbstractContextManager[BinaryIO]],
        *,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Write files of the device to `sinks`, opened one by one; gives the bytes received."""
        ...

    def forward(self, port: int) -> Forward:
        """Open a forward to a port of the device, which the caller closes."""
        ...

    def find_root(self, device: "Device", timeout_s: float) -> str:
        """Return the path of our folder, which need not exist yet."""
        ...

    def properties(self, device: "Device", timeout_s: float) -> DeviceProperties:
        """Ask the device for its properties."""
        ...

    def reboot(self, device: "Device", timeout_s: float) -> None:
        """Make it reboot; that it goes away meanwhile is no failure."""
        ...

    def is_up(self, device: "Device", deadline: Deadline) -> bool:
        """Return whether it says that it has come up; may fail as a device does that has not."""
        ...


class CommandRunner:
    """Runs commands on a device, each of which ends with all that it started. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._leftovers = Leftovers(self._kill_once)

    def run(
        self,
        line: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        sinks: tuple[Sink, Sink],
        timeout_s: float,
        action: str,
        log: Callable[[], str],
    ) -> tuple[int, tuple[str, ...]]:
        """Run a command line; gives its exit status, and `CommandResult.left`.

        Raises:
            DeviceCommandError: the device's shell refused it.
        """
        job = Job(line, env)
        script = job.script
        deadline = Deadline(timeout_s)
        stdout, stderr = job.outputs(*sinks, on_end=lambda: deadline.shorten(_HELD_S))
        leftovers: tuple[str, ...] = ()
        with self.transport.typed(action, timeout_s, log):
            self._leftovers.kill(deadline.at_most(_SILENT_S))
            try:
                try:
                    status = self.transport.execute(script, stdin, stdout, stderr, deadline)
                except DeadlineExceeded:
                    if job.status is None:
                        raise
                    status, leftovers = job.status, self._left_by(job)
                stdout.close()
                stderr.close()
            except BaseException as failure:
                if job.started or not _unstarted(failure):
                    self._leftovers.add(job)
                    with contextlib.suppress(DeviceTimeoutError):
                        self._leftovers.kill(_KILL_TIMEOUT_S)
                raise
        if status and not job.started:  # a login shell, or a forced command, that runs nothing
            raise DeviceCommandError(self.transport.serial, "its shell", status, log())
        return status, leftovers

    def doubt(self) -> None:
        """Let the next command check first that the device answers: just now it did not."""
        self._leftovers.add(Job(""))

    def _left_by(self, job: Job) -> tuple[str, ...]:
        """List the processes of a job; nothing where the device does not tell."""
        output = BoundedOutput(_MOST_LISTED)
        with contextlib.suppress(DeviceTimeoutError):
            self._execute_quietly("listing what is left", job.list_script, output, _KILL_TIMEOUT_S)
        return tuple(one_line(line) for line in output.text().splitlines() if line.strip())

    def _kill_once(self, job: Job, timeout_s: float) -> bool:
        """Kill a job; return whether that is certain.

        Raises `DeviceTimeoutError` where the device does not even begin to: a command would wait
        for its whole time there, and the clean-up after it again.
        """
        output = BoundedOutput(_MOST_LISTED)
        try:
            return self._execute_quietly("killing what ran", job.kill_script, output, timeout_s)
        except DeviceTimeoutError:
            if output.text():
                return False
            raise

    def _execute_quietly(self, action: str, script: str, stdout: Sink, timeout_s: float) -> bool:
        """Run a script of ours, and return whether the device did."""
        transport = self.transport
        try:
            with transport.typed(action, timeout_s):
                transport.execute(script, None, stdout, BoundedOutput(1), Deadline(timeout_s))
        except DeviceTimeoutError:
            raise
        except HarnessError:
            return False
        return True


class Device:
    """A device that runs a POSIX shell, reached by a transport. It may be used by several threads.

    All methods raise `DeviceLostError` when it goes away, `DeviceTimeoutError` when their
    `timeout_s` is over, which counts from the call and covers all that it does, and
    `DeviceUnauthorizedError` when it does not let us in.

    A subclass that guards a device overrides `unleased` and the methods from `_using` to `_error`.
    """

    def __init__(self, transport: Transport, *, runner: CommandRunner | None = None) -> None:
        """`runner` is that of another object of the same device."""
        self.runner = runner or CommandRunner(transport)
        self._transport = transport
        self._work_root: str | None = None

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.serial!r}, {self.type!r})"

    @property
    def serial(self) -> str:
        """The name by which it is addressed."""
        return self._transport.serial

    @property
    def type(self) -> str:
        """Device type, which says how it is reached."""
        return self._transport.type

    @property
    def work_root(self) -> str:
        """The folder on it that is ours, `$TMPDIR/qnnfarm`; it need not exist yet. Found once."""
        return self._root_within(_FIND_TIMEOUT_S)

    @property
    def unleased(self) -> "Device":
        """The device without the checks of its lease, if it has one."""
        return self

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """Ask the device for its properties."""
        with self._using():
            return self._transport.properties(self.unleased, timeout_s)

    def free_bytes(self, *, timeout_s: float = 30.0) -> int | None:
        """Return the free space under the work root; `None` if the device cannot tell."""
        deadline = Deadline.for_device(self.serial, "asking for its free space", timeout_s)
        with self._using():
            path = self._root_within(timeout_s)
            root, above = shlex.quote(path), shlex.quote(posixpath.dirname(path))
            script = f"if [ -d {root} ]; then {DF} {root}; else {DF} {above}; fi"
            left_s = deadline.remaining()
            return parse_df(self.unleased.shell(script, timeout_s=left_s, check=False).stdout)

    def boot_id(self, *, timeout_s: float = 30.0) -> str:
        """Return the id of its boot, which each boot changes."""
        with self._using():
            answer = self.unleased.shell(_BOOT_ID_SCRIPT, timeout_s=timeout_s).stdout.strip()
            if not _BOOT_ID.fullmatch(answer):
                raise DeviceCommandError(self.serial, _BOOT_ID_SCRIPT, 0, "it tells no boot id")
            return answer

    def shell(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        stdin: bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        max_output: int = _MAX_OUTPUT,
    ) -> CommandResult:
        """Run a script (text) or one command (words, which need no quoting).

        `check` says whether an exit status other than 0 raises `DeviceCommandError`, `max_output`
        how many bytes to keep of each of stdout and stderr. When it ends by any exception, the
        command is killed on the device with all that it started. It ends when its shell does:
        background processes may go on, and are not waited for even if they hold the output.
        """
        text = command_line(command)
        outputs = BoundedOutput(max_output), BoundedOutput(max_output)
        result = self._run(text, env, stdin, outputs, outputs, timeout_s)
        if check and result.exit_status:
            raise self._error(text, result)
        return result

    def stream(
        self,
        command: str | Sequence[str],
        *,
        on_output: Callable[[bytes], None],
        timeout_s: float,
    ) -> CommandResult:
        """Run a command and hand on its stdout and stderr as they come.

        When it ends by an exception (of `on_output` too, or a `KeyboardInterrupt`), the command is
        killed on the device with all that it started. An exit status other than 0 raises nothing.
        """
        outputs = BoundedOutput(_MAX_OUTPUT), BoundedOutput(_MAX_OUTPUT)
        sinks = Tee(outputs[0], on_output), Tee(outputs[1], on_output)
        return self._run(command_line(command), None, None, sinks, outputs, timeout_s)

    def push(
        self,
        local: Path,
        remote: str,
        *,
        timeout_s: float = 600.0,
        mode: int | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file to the device, with its mtime; gives its size, which is checked there."""
        with self._transferring(before=True):
            stat = stat_local(local)
            mode = stat_bits.S_IMODE(stat.st_mode) if mode is None else mode
            return self._transport.send(
                f"push of {local.name}",
                [PushItem(local, remote, mode)],
                mtime=int(stat.st_mtime),
                check=True,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )

    def push_many(
        self,
        items: Iterable[PushItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files in one go, with the present as their mtime; gives the bytes sent.

        Sizes on the device are not checked over ADB.
        """
        with self._transferring(before=True):
            batch = list(items)
            for item in batch:
                stat_local(item.local)
            return self._transport.send(
                f"push of {len(batch)} files",
                batch,
                mtime=int(time.time()),
                check=False,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )

    def pull(
        self,
        remote: str,
        local: Path,
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file from the device; `local` appears only once it is whole."""
        action = f"pull of {posixpath.basename(remote)}"
        with self._transferring():
            return self._transport.receive(
                action, [remote], [receiving(local)], timeout_s=timeout_s, on_progress=on_progress
            )

    def pull_many(
        self,
        items: Iterable[PullItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files from the device in one go; gives the bytes received.

        Each appears only once it is whole, but unlike with `pull`, none is synced to the disk.
        """
        with self._transferring():
            batch = list(items)
            return self._transport.receive(
                f"pull of {len(batch)} files",
                [item.remote for item in batch],
                (receiving(item.local, sync=False) for item in batch),
                timeout_s=timeout_s,
                on_progress=on_progress,
            )

    def forward(self, remote: str) -> AbstractContextManager[tuple[str, int]]:
        """Yield an address of this host that leads to `remote`, `tcp:PORT` on the device."""
        self._ask()
        return self._forwarding(_port(remote))

    def reboot(self, *, timeout_s: float = 300.0) -> None:
        """Reboot it, and return when it is usable again with another boot id."""
        self._ask()
        with self._using(), self._transport.typed("reboot", timeout_s):
            deadline = Deadline(timeout_s)
            device = self.unleased  # until it is up again, its guard may not be there
            try:
                before = device.boot_id(timeout_s=min(_ASK_TIMEOUT_S, deadline.remaining()))
                self._transport.reboot(device, deadline.remaining())
            except DeviceTimeoutError:
                deadline.remaining()  # what took too long is the reboot, not one command of it
                raise
            while not self._is_back(before, Deadline(min(_ASK_TIMEOUT_S, deadline.remaining()))):
                time.sleep(min(_REBOOT_POLL_S, deadline.remaining()))

    def _using(self) -> AbstractContextManager[None]:
        """Surround a use of the device."""
        return nullcontext()

    def _naming(self, text: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surround the run of a command; may reword its errors."""
        return nullcontext()

    def _ask(self) -> None:
        """Ask the device itself whether it may be used."""

    def _guarded(self, text: str) -> tuple[str, Mapping[str, str]]:
        """Return the guarded form of a command, and the environment that it needs.

        It is part of the job: output before the job's greeting is dropped.
        """
        return text, {}

    def _judge(self, result: CommandResult) -> None:
        """Take note of the result of a command."""

    def _error(self, text: str, result: CommandResult) -> DeviceCommandError:
        """Return the error of a command that failed."""
        tail = (result.stderr if result.stderr.strip() else result.stdout)[-_LOG_TAIL:]
        return DeviceCommandError(self.serial, text, result.exit_status, tail)

    @contextmanager
    def _forwarding(self, port: int) -> Iterator[tuple[str, int]]:
        with self._transport.forward(port) as forward:
            yield forward.address

    @contextmanager
    def _transferring(self, *, before: bool = False) -> Iterator[None]:
        """Surround a transfer; the device is asked after it and, if `before` is set, before it."""
        if before:
            self._ask()
        with self._using():
            try:
                yield
            except DeviceTimeoutError:
                self.runner.doubt()
                raise
        self._ask()

    def _root_within(self, timeout_s: float) -> str:
        if self._work_root is None:
            self._work_root = self._transport.find_root(self.unleased, timeout_s)
        return self._work_root

    def _run(
        self,
        text: str,
        env: Mapping[str, str] | None,
        stdin: bytes | None,
        sinks: tuple[Sink, Sink],
        kept: tuple[BoundedOutput, BoundedOutput],
        timeout_s: float,
    ) -> CommandResult:
        stdout, stderr = kept
        line, more = self._guarded(text)
        with self._using(), self._naming(text):
            status, leftovers = self.runner.run(
                line,
                {**(env or {}), **more},
                stdin,
                sinks,
                timeout_s,
                f"`{text}`",
                lambda: (stderr.text() + stdout.text())[-_LOG_TAIL:],
            )
        result = CommandResult(status, stdout.text(), stderr.text(), leftovers)
        self._judge(result)
        return result

    def _is_back(self, before: str, deadline: Deadline) -> bool:
        """Return whether it runs commands, after another boot than `before`."""
        device = self.unleased
        try:
            up = self._transport.is_up(device, deadline)
            return up and device.boot_id(timeout_s=deadline.remaining()) != before
        except _NOT_YET:
            return False


def _unstarted(failure: BaseException) -> bool:
    """Return whether the failure leaves no doubt that a command without a greeting never ran."""
    return isinstance(failure, FailReply | ServerUnreachable | HarnessError)


def _port(remote: str) -> int:
    match = _FORWARD.fullmatch(remote)
    if not match or not 0 < int(match[1]) < 65536:
        raise ValueError(f"{remote!r} is not tcp:PORT")
    return int(match[1])
