"""Base of all devices with a POSIX shell, given a way to run one command there."""

import contextlib
import posixpath
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.connection import FailReply, ServerUnreachable
from harness.devices.base import CommandResult
from harness.devices.commands import BoundedOutput, Job, Leftovers, Sink, Tee, command_line
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


class ShellDevice(ABC):
    """Commands on a device, and what can be done by commands alone.

    It may be used by several threads.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._leftovers = Leftovers(self._kill_once)
        self._work_root: str | None = None

    @property
    def serial(self) -> str:
        """The name by which it is addressed."""
        return self._shown

    @property
    def work_root(self) -> str:
        """The folder on it that is ours; found once."""
        return self._root_within(_FIND_TIMEOUT_S)

    def _root_within(self, timeout_s: float) -> str:
        if self._work_root is None:
            self._work_root = self._find_root(timeout_s)
        return self._work_root

    @abstractmethod
    def _find_root(self, timeout_s: float) -> str:
        """Return the path of our folder, which need not exist yet."""

    @abstractmethod
    def _execute(
        self, script: str, stdin: bytes | None, stdout: Sink, stderr: Sink, deadline: Deadline
    ) -> int:
        """Run a script in a process group of its own; gives its exit status.

        Raises bare failures, which `_typed` knows.
        """

    @abstractmethod
    def _typed(
        self, action: str, timeout_s: float, log: Callable[[], str] | None = None
    ) -> AbstractContextManager[None]:
        """Turn bare failures inside into errors of the harness; see `Failures.typed`."""

    @abstractmethod
    def _ask_to_reboot(self, timeout_s: float) -> None:
        """Make it reboot; that it goes away meanwhile is no failure."""

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
        """Run a script (text) or one command (words); see `Device.shell`."""
        stdout, stderr = BoundedOutput(max_output), BoundedOutput(max_output)
        status, left = self._run(
            command, env, stdin, (stdout, stderr), timeout_s, lambda: stderr.text() + stdout.text()
        )
        result = CommandResult(status, stdout.text(), stderr.text(), left)
        if check and status:
            tail = (result.stderr if result.stderr.strip() else result.stdout)[-_LOG_TAIL:]
            raise DeviceCommandError(self.serial, command_line(command), status, tail)
        return result

    def stream(
        self,
        command: str | Sequence[str],
        *,
        on_output: Callable[[bytes], None],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command and hand on its output as it comes; see `Device.stream`."""
        stdout, stderr = BoundedOutput(_MAX_OUTPUT), BoundedOutput(_MAX_OUTPUT)
        sinks = Tee(stdout, on_output), Tee(stderr, on_output)
        status, left = self._run(
            command, env, None, sinks, timeout_s, lambda: stderr.text() + stdout.text()
        )
        return CommandResult(status, stdout.text(), stderr.text(), left)

    def free_bytes(self, *, timeout_s: float = 30.0) -> int | None:
        """Return the free space where the work root is, or will be."""
        deadline = Deadline(timeout_s)
        root = self._root_within(timeout_s)
        script = (
            f"if [ -d {shlex.quote(root)} ]; then {DF} {shlex.quote(root)}; "
            f"else {DF} {shlex.quote(posixpath.dirname(root))}; fi"
        )
        with self._typed("asking for its free space", timeout_s):
            left = deadline.remaining()
        return parse_df(self.shell(script, timeout_s=left, check=False).stdout)

    def boot_id(self, *, timeout_s: float = 30.0) -> str:
        """Return the id of its boot, which each boot changes."""
        answer = self.shell(_BOOT_ID_SCRIPT, timeout_s=timeout_s).stdout.strip()
        if not _BOOT_ID.fullmatch(answer):
            raise DeviceCommandError(self.serial, _BOOT_ID_SCRIPT, 0, "it tells no boot id")
        return answer

    def reboot(self, *, timeout_s: float = 300.0) -> None:
        """Reboot it, and wait until it is usable again; see `Device.reboot`."""
        deadline = Deadline(timeout_s)
        with self._typed("reboot", timeout_s):
            try:
                before = self.boot_id(timeout_s=min(_ASK_TIMEOUT_S, deadline.remaining()))
                self._ask_to_reboot(deadline.remaining())
            except DeviceTimeoutError:
                deadline.remaining()  # what took too long is the reboot, not one command of it
                raise
            while not self._is_back(before, Deadline(min(_ASK_TIMEOUT_S, deadline.remaining()))):
                time.sleep(min(_REBOOT_POLL_S, deadline.remaining()))

    def _is_back(self, before: str, deadline: Deadline) -> bool:
        """Return whether it runs commands, after another boot than `before`."""
        try:
            return self._is_up(deadline) and self.boot_id(timeout_s=deadline.remaining()) != before
        except _NOT_YET:
            return False

    def _is_up(self, deadline: Deadline) -> bool:  # noqa: ARG002 - for devices that know more
        """Return whether it says that it has come up; may fail as a device does that has not."""
        return True

    def _run(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None,
        stdin: bytes | None,
        sinks: tuple[Sink, Sink],
        timeout_s: float,
        log: Callable[[], str],
    ) -> tuple[int, tuple[str, ...]]:
        """Run a command; gives its exit status, and what it left behind with its output open."""
        job = Job(command_line(command), env)
        script = job.script
        deadline = Deadline(timeout_s)
        stdout, stderr = job.outputs(*sinks, on_end=lambda: deadline.shorten(_HELD_S))
        left: tuple[str, ...] = ()
        with self._typed(f"`{command_line(command)}`", timeout_s, log):
            self._leftovers.kill(deadline.at_most(_SILENT_S))
            try:
                try:
                    status = self._execute(script, stdin, stdout, stderr, deadline)
                except DeadlineExceeded:
                    if job.status is None:
                        raise
                    status, left = job.status, self._left_by(job)
                stdout.close()
                stderr.close()
            except BaseException as failure:
                if job.started or not _unstarted(failure):
                    self._leftovers.add(job)
                    with contextlib.suppress(DeviceTimeoutError):
                        self._leftovers.kill(_KILL_TIMEOUT_S)
                raise
        return status, left

    def _left_by(self, job: Job) -> tuple[str, ...]:
        """List the processes of a job; nothing where the device does not tell."""
        listed = BoundedOutput(_MOST_LISTED)
        with contextlib.suppress(DeviceTimeoutError):
            self._execute_quietly("listing what is left", job.list_script, listed, _KILL_TIMEOUT_S)
        return tuple(one_line(line) for line in listed.text().splitlines() if line.strip())

    def doubt(self) -> None:
        """Have the next command see first that the device answers, as it stopped to just now."""
        self._leftovers.add(Job(""))

    def _kill_once(self, job: Job, timeout_s: float) -> bool:
        """Kill a job; return whether that is certain.

        Raises:
            DeviceTimeoutError: the device does not even begin to. A command would wait for its
                whole time there, and the clean-up after it again.
        """
        output = BoundedOutput(_MOST_LISTED)
        try:
            return self._execute_quietly("killing what ran", job.kill_script, output, timeout_s)
        except DeviceTimeoutError:
            if output.text():
                return False
            raise

    def _execute_quietly(self, action: str, script: str, stdout: Sink, timeout_s: float) -> bool:
        """Run a script of ours, and return whether the device did.

        Raises:
            DeviceTimeoutError: it took too long.
        """
        try:
            with self._typed(action, timeout_s):
                self._execute(script, None, stdout, BoundedOutput(1), Deadline(timeout_s))
        except DeviceTimeoutError:
            raise
        except HarnessError:
            return False
        return True


def _unstarted(failure: BaseException) -> bool:
    """Return whether the failure leaves no doubt that a command without a greeting never ran."""
    return isinstance(failure, FailReply | ServerUnreachable | HarnessError)


def forwarded_port(remote: str) -> int:
    """Return the port of `tcp:PORT`.

    Raises:
        ValueError: it has another form.
    """
    match = _FORWARD.fullmatch(remote)
    if not match or not 0 < int(match[1]) < 65536:
        raise ValueError(f"{remote!r} is not tcp:PORT")
    return int(match[1])
