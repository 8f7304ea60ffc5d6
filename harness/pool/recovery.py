"""Recovery of a device: gentle steps first, each recorded with its result."""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.client import TCP_SERIAL
from harness.devices.adb.connection import (
    FailReply,
    ServerAddress,
    ServerUnreachable,
    StreamClosed,
    query,
)
from harness.devices.adb.server import ensure_server, server_address
from harness.devices.types import device_types
from harness.errors import (
    AdbServerError,
    DeviceConnectError,
    DeviceFullError,
    DeviceHeldError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
    DeviceUnsupportedError,
    HarnessError,
    LeaseLostError,
    PoolError,
    one_line,
)
from harness.pool.config import StepName
from harness.pool.context import PoolContext
from harness.pool.hubs import cycle_power
from harness.pool.members import Member
from harness.pool.opener import ReachedDevice, identify
from harness.pool.programs import run_program
from harness.pool.records import DeviceRow, LeaseRow
from harness.pool.status import OnProgress

NO_STEP_HELPS = (DeviceHeldError, DeviceFullError)
"""Errors of a device that answers, but cannot be claimed."""
_ANSWER_S = 15.0
_POLL_S = 0.5
_DESCRIPTIONS: Mapping[StepName, str] = MappingProxyType(
    {
        "reconnect": "connecting to it anew",
        "adb_server": "starting its adb server, or restarting it if it is ours",
        "reboot": "rebooting it",
        "power_cycle": "switching its power off and on",
    }
)


class Recovery:
    """One recovery of a device, step by step, under a lease of its own.

    Args:
        lease: the repair's.
        stopped: whether to give up early.
        on_progress: called with each step before it is taken, and with its result.
        from_others: whether to take the device from a holder of another ledger.
    """

    def __init__(
        self,
        context: PoolContext,
        member: Member,
        lease: LeaseRow,
        stopped: Callable[[], bool],
        on_progress: OnProgress,
        *,
        from_others: bool = False,
    ) -> None:
        self._context = context
        self._config = context.config.recovery
        self._opener = context.opener
        self._trusted_users = context.config.adb_server.trusted_users
        self._ledger = context.ledger
        self._member = member
        self._lease = lease
        self._stopped = stopped
        self._on_progress = on_progress
        self._from_others = from_others

    def run(self, device: DeviceRow) -> ReachedDevice:
        """Take the steps until the device answers.

        A recovery that was cut off goes on with the step that it had begun. For a device that was
        never reached, the only step is `reconnect`.

        Raises:
            DeviceHeldError: another ledger's holder has it, so no step is taken.
            DeviceFullError: it cannot be claimed, so no step is taken.
            PoolError: no step helped; says why the last did not.
        """
        self._on_progress("asking whether it answers")
        try:
            return self._wait_for_answer("look", 0.0)
        except NO_STEP_HELPS:
            raise
        except HarnessError as error:
            last = f"look: {one_line(str(error))}"
        steps, patience_s = self._config.steps, self._config.return_timeout_s
        if not (device.leases or device.facts.soc):
            steps, patience_s = ("reconnect",) if "reconnect" in steps else steps, 0.0
        first = steps.index(device.step) if device.step in steps else 0
        for step in steps[first:]:
            self._check_stopped()
            self._ledger.record_step(self._lease.key, self._lease.token, step)
            self._on_progress(self._announcement(step, patience_s))
            try:
                self._take(step)
                return self._wait_for_answer(step, patience_s)
            except NO_STEP_HELPS:
                raise
            except HarnessError as error:
                self._check_stopped()  # a step that was cut off says nothing
                reason = one_line(str(error))
                self._record(step, f"did not help: {reason}")
                last = f"{step}: {reason}"
        raise PoolError(last)

    def _check_stopped(self) -> None:
        if self._stopped():
            raise PoolError("recovery was interrupted")

    def _record(self, step: str, text: str) -> None:
        self._ledger.add_history(self._lease.key, f"recovery: {step}", text)
        self._on_progress(f"{step}: {text}")

    def _announcement(self, step: StepName, patience_s: float) -> str:
        text = f"{step}: {_DESCRIPTIONS[step]}"
        if step in ("reboot", "power_cycle"):
            reboot = step == "reboot"
            config = self._config
            limit_s = config.reboot_timeout_s if reboot else config.power_cycle_timeout_s
            text += f", {limit_s:g} s at most"
        return f"{text}; then it has {patience_s:g} s to answer" if patience_s else text

    def _wait_for_answer(self, step: str, patience_s: float) -> ReachedDevice:
        """Ask the device who it is until it answers and can be claimed."""
        deadline = time.monotonic() + patience_s
        while True:
            self._opener.forget(self._member)
            try:
                device = self._opener.open(self._member)
                reached = identify(self._member, device, self._ledger, timeout_s=_ANSWER_S)
                if reached.key == self._lease.key:
                    self._try_claim()
            except HarnessError as error:
                if (
                    isinstance(error, NO_STEP_HELPS)
                    or time.monotonic() >= deadline
                    or self._stopped()
                ):
                    raise
                time.sleep(_POLL_S)
                continue
            self._record(step, "it answers")
            return reached

    def _try_claim(self) -> None:
        with suppress(LeaseLostError):
            claimed = self._context.claims.claim(
                self._lease.token, self._lease.key, self._member, from_others=self._from_others
            )
            claimed.fence.give_back(claimed.device)

    def _take(self, step: StepName) -> None:
        match step:
            case "reconnect":
                self._reconnect()
            case "adb_server":
                self._restart_server()
            case "reboot":
                device = self._opener.open(self._member)
                device.reboot(timeout_s=self._config.reboot_timeout_s)
            case "power_cycle":
                self._power_cycle()

    def _reconnect(self) -> None:
        serial = self._adb_serial
        if not serial:
            return
        server = ensure_server(trusted_users=self._trusted_users)
        if TCP_SERIAL.fullmatch(serial):
            server.disconnect(serial)
            # A failure is not the end of the step: a device that boots gets the time for it, as
            # waiting for its answer connects again.
            with suppress(DeviceConnectError, DeviceTimeoutError):
                server.connect(serial)
        else:
            _ask(server.address, f"host-serial:{serial}:reconnect")

    def _restart_server(self) -> None:
        own = self._adb_serial
        if own is None:
            self._opener.restart_server(self._member)
            return
        others: list[str] = []
        address = server_address()
        if _listens(address):
            if not self._context.config.adb_server.ours:
                raise PoolError("not taken: the configuration does not say that it is ours")
            if self._ledger.in_use(besides=self._lease.key):
                raise PoolError("not taken: it serves devices that are in use")
            others = _tcp_devices(self._trusted_users)
            _kill(address)
        server = ensure_server(address, trusted_users=self._trusted_users)
        for serial in others:  # a new server finds devices on USB by itself, but not these
            if serial != own:
                with suppress(DeviceConnectError, DeviceTimeoutError, DeviceUnauthorizedError):
                    server.connect(serial, timeout_s=_ANSWER_S)
        if TCP_SERIAL.fullmatch(own):
            server.connect(own)

    def _power_cycle(self) -> None:
        member, timeout_s = self._member, self._config.power_cycle_timeout_s
        if member.hub is not None and not member.power_cycle:
            others = _other_serials(member, self._trusted_users)
            cycle_power(member.hub, member.spec.serial, others, timeout_s)
            return
        command = member.power_cycle or self._config.power_cycle
        if command:
            run_program(fill_placeholders(command, member, self._lease.key), timeout_s)
            return
        spec = member.spec
        try:
            device_types()[spec.type].power_cycle(spec)
        except DeviceUnsupportedError as error:
            raise PoolError(f"not taken: {error.reason}") from None

    @property
    def _adb_serial(self) -> str | None:
        """Its serial at this host's adb server; `None` if it is not reached through it."""
        return device_types()[self._member.spec.type].preview(self._member.spec).adb_serial


def fill_placeholders(command: Sequence[str], member: Member, key: str) -> list[str]:
    """Replace `{name}`, `{serial}` and `{key}` in a user's command by the device's.

    Braces in the values stay as they are.
    """
    values = {"name": member.name, "serial": member.spec.serial, "key": key}
    return [
        re.sub(r"\{(name|serial|key)\}", lambda match: values[match[1]], word) for word in command
    ]


def _ask(address: ServerAddress, service: str) -> None:
    try:
        query(address, service, Deadline(_ANSWER_S))
    except FailReply as error:
        raise PoolError(f"the adb server says: {error}") from None
    except (StreamClosed, ServerUnreachable, DeadlineExceeded) as error:
        raise AdbServerError(str(address), f"went away: {error}") from None


def _listens(address: ServerAddress) -> bool:
    """Return whether anything listens at the adb server's address."""
    try:
        query(address, "host:version", Deadline(_ANSWER_S))
    except ServerUnreachable:
        return False
    except (StreamClosed, FailReply, DeadlineExceeded):
        pass
    return True


def _other_serials(member: Member, trusted_users: Collection[str]) -> list[str]:
    """Return the serials of the other devices at this host's adb server, if one runs."""
    if not _listens(server_address()):
        return []
    entries = ensure_server(trusted_users=trusted_users).devices()
    return [entry.serial for entry in entries if entry.serial != member.spec.serial]


def _tcp_devices(trusted_users: Collection[str]) -> list[str]:
    """Return the usable devices that the adb server reaches by TCP, if it still answers."""
    try:
        entries = ensure_server(trusted_users=trusted_users).devices()
        serials = [entry.serial for entry in entries if entry.usable]
    except AdbServerError:
        return []
    return [serial for serial in serials if TCP_SERIAL.fullmatch(serial)]


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
