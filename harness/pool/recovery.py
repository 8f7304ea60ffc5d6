"""Getting a device back: gentle steps first, each recorded with how it went."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.address import ServerAddress, address_from
from harness.devices.adb.connection import FailReply, ServerUnreachable, StreamClosed, query
from harness.devices.adb.server import ensure_server
from harness.devices.types import device_types
from harness.errors import (
    AdbServerError,
    DeviceConnectError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
    DeviceUnsupportedError,
    HarnessError,
    RecoveryStepError,
    one_line,
)
from harness.pool.config import PoolConfig, StepName
from harness.pool.members import Member
from harness.pool.opening import Opener, Reached, survey

_ANSWER_S = 15.0
_POLL_S = 0.5
_TCP = re.compile(r".+:\d{1,5}")
_WORDS: Mapping[StepName, str] = MappingProxyType(
    {
        "reconnect": "connecting to it anew",
        "adb_server": "starting its adb server, or restarting it if it is ours",
        "reboot": "rebooting it",
        "power_cycle": "switching its power off and on",
    }
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Takes one device through the steps.

    Attributes:
        prove: tries a device that answered; raises if it cannot be used yet.
        server_in_use: whether somebody else holds a device of the same adb server.
        record: called with the name of each step and how it went.
        begin: told in words of each step before it is taken.
        stopped: whether to give up early.
        reached: called with the name of each step before it is taken.
        cut_off: the step in which the last process was cut off; empty: none.
    """

    member: Member
    key: str
    opener: Opener
    config: PoolConfig
    prove: Callable[[Reached], None]
    server_in_use: Callable[[], bool]
    record: Callable[[str, str], None]
    begin: Callable[[str], None]
    stopped: Callable[[], bool]
    reached: Callable[[str], None]
    cut_off: str = ""

    def run(self, *, gently: bool = False) -> Reached:
        """Try the steps until the device answers.

        Args:
            gently: just look and reconnect, for a device that was never seen.

        Raises:
            RecoveryStepError: none helped; says why the last did not.
        """
        self.begin("asking whether it answers")
        try:
            return self._look(0.0, "look")
        except HarnessError as error:
            last = f"look: {one_line(str(error))}"
        steps = self.config.recovery.steps
        if gently and "reconnect" in steps:
            steps = ("reconnect",)
        patience_s = 0.0 if gently else self.config.recovery.return_timeout_s
        begun = steps.index(self.cut_off) if self.cut_off in steps else 0
        for step in steps[begun:]:
            self._go_on()
            self.reached(step)
            self.begin(self._in_words(step, patience_s))
            try:
                self._take(step)
                return self._look(patience_s, step)
            except HarnessError as error:
                last = self._no_help(step, error)
        raise RecoveryStepError(last)

    def _no_help(self, step: StepName, error: HarnessError) -> str:
        """Why a step did not help; that it was cut off says nothing of it."""
        self._go_on()
        reason = one_line(str(error))
        self.record(step, f"did not help: {reason}")
        return f"{step}: {reason}"

    def _go_on(self) -> None:
        if self.stopped():
            raise RecoveryStepError("recovery was interrupted")

    @property
    def _most_s(self) -> Mapping[StepName, float]:
        """How long the steps themselves may take that take long."""
        config = self.config.recovery
        return {"reboot": config.reboot_timeout_s, "power_cycle": config.power_cycle_timeout_s}

    def _in_words(self, step: StepName, patience_s: float) -> str:
        words = f"{step}: {_WORDS[step]}"
        if step in self._most_s:
            words += f", {self._most_s[step]:g} s at most"
        return f"{words}; then it has {patience_s:g} s to answer" if patience_s else words

    def _look(self, patience_s: float, step: str) -> Reached:
        """Ask the device who it is, again and again."""
        deadline = time.monotonic() + patience_s
        while True:
            self.opener.forget(self.member)
            try:
                reached = survey(self.member, self.opener.open(self.member), timeout_s=_ANSWER_S)
                self.prove(reached)
            except HarnessError:
                if time.monotonic() >= deadline or self.stopped():
                    raise
                time.sleep(_POLL_S)
                continue
            self.record(step, "it answers")
            return reached

    def _take(self, step: StepName) -> None:
        match step:
            case "reconnect":
                self._reconnect()
            case "adb_server":
                self._restart_server()
            case "reboot":
                device = self.opener.open(self.member)
                device.reboot(timeout_s=self.config.recovery.reboot_timeout_s)
            case "power_cycle":
                self._power_cycle()

    def _reconnect(self) -> None:
        serial = self._adb_serial
        if not serial:
            return
        server = ensure_server()
        if ":" in serial:
            server.disconnect(serial)
            # Whoever looks next connects again: a device that boots gets the time for it, not at
            # once a step that may disturb others.
            with suppress(DeviceConnectError, DeviceTimeoutError):
                server.connect(serial)
        else:
            _ask(server.address, f"host-serial:{serial}:reconnect")

    def _restart_server(self) -> None:
        own = self._adb_serial
        if own is None:
            self.opener.restart_server(self.member)
            return
        lost: list[str] = []
        if _listens():
            if not self.config.adb_server.ours:
                raise RecoveryStepError("not taken: the configuration does not say that it is ours")
            if self.server_in_use():
                raise RecoveryStepError("not taken: it serves devices that are in use")
            lost = _tcp_devices()
            _kill(address_from(os.environ))
        server = ensure_server()
        for serial in lost:  # a new server finds those on USB by itself, but not these
            if serial != own:
                with suppress(DeviceConnectError, DeviceTimeoutError, DeviceUnauthorizedError):
                    server.connect(serial, timeout_s=_ANSWER_S)
        if ":" in own:
            server.connect(own)

    def _power_cycle(self) -> None:
        command = self.member.power_cycle or self.config.recovery.power_cycle
        if command:
            run_command(
                fill(command, self.member, self.key), self.config.recovery.power_cycle_timeout_s
            )
            return
        spec = self.member.spec
        try:
            device_types()[spec.type].power_cycle(spec)
        except DeviceUnsupportedError as error:
            raise RecoveryStepError(f"not taken: {error.reason}") from None

    @property
    def _adb_serial(self) -> str | None:
        """Its serial at this host's adb server; `None` if it is not reached through that."""
        return device_types()[self.member.spec.type].preview(self.member.spec).adb_serial


def fill(command: Sequence[str], member: Member, key: str) -> list[str]:
    """The words of a user's command with the device's in place of `{name}`, `{serial}`, `{key}`.

    Nothing is interpreted twice: braces in a name stay what they are.
    """
    values = {
        "{" + word + "}": value
        for word, value in (
            ("name", member.name),
            ("serial", member.spec.serial),
            ("key", key),
        )
    }
    words = []
    for word in command:
        parts, rest = [], word
        while rest:
            at, mark = min(
                ((rest.find(mark), mark) for mark in values if mark in rest),
                default=(len(rest), ""),
            )
            parts += [rest[:at], values.get(mark, "")]
            rest = rest[at + len(mark) :]
        words.append("".join(parts))
    return words


def run_command(words: Sequence[str], timeout_s: float) -> None:
    """Run a user's command, without a shell.

    Raises:
        RecoveryStepError: it failed, or took too long.
    """
    program = one_line(words[0], 80)
    try:
        done = subprocess.run(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RecoveryStepError(f"{program} took longer than {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise RecoveryStepError(f"{program} cannot be run: {error}") from None
    if done.returncode:
        said = one_line(done.stdout[-2000:].decode("utf-8", "replace"))
        raise RecoveryStepError(
            f"{program} ended with status {done.returncode}: {said or '(silent)'}"
        )


def _ask(address: ServerAddress, service: str) -> None:
    try:
        query(address, service, Deadline(_ANSWER_S))
    except FailReply as error:
        raise RecoveryStepError(f"the adb server says: {error}") from None
    except (StreamClosed, ServerUnreachable, DeadlineExceeded) as error:
        raise AdbServerError(str(address), f"went away: {error}") from None


def _listens() -> bool:
    """Whether something is at the adb server's port, sound or not."""
    try:
        query(address_from(os.environ), "host:version", Deadline(_ANSWER_S))
    except ServerUnreachable:
        return False
    except (StreamClosed, FailReply, DeadlineExceeded):
        pass
    return True


def _tcp_devices() -> list[str]:
    """The usable devices that the adb server reaches by the network, if it still answers."""
    try:
        known = [found.serial for found in ensure_server().devices() if found.usable]
    except AdbServerError:
        return []
    return [serial for serial in known if _TCP.fullmatch(serial)]


def _kill(address: ServerAddress) -> None:
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        try:
            query(address, "host:kill", Deadline(_ANSWER_S))
        except ServerUnreachable:
            return
        except (StreamClosed, FailReply, DeadlineExceeded):
            pass
        time.sleep(0.05)
    raise AdbServerError(str(address), "does not end")
