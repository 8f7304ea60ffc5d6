"""Repair of devices by the processes that wait for one: recovery, step by step, and probation."""

import hashlib
import logging
import math
import os
import posixpath
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.clock import Deadline, DeadlineExceeded
from harness.deploy.digests import hashes_on
from harness.deploy.scripts import PROBATION, action_named, ensure_scripts
from harness.devices.adb.client import TCP_SERIAL
from harness.devices.adb.connection import ServerAddress, query
from harness.devices.adb.server import ensure_server, is_taken, server_address
from harness.devices.base import FailReply, ServerUnreachable, StreamClosed
from harness.devices.device import Device
from harness.devices.spec import device_types
from harness.errors import (
    AdbServerError,
    DeploymentCorruptError,
    DeviceConnectError,
    DeviceFullError,
    DeviceHeldError,
    DeviceLostError,
    DeviceTimeoutError,
    DeviceUnauthorizedError,
    DeviceUnsupportedError,
    HarnessError,
    LeaseLostError,
    PoolError,
    RuntimeOutputError,
    one_line,
)
from harness.pool.config import StepName
from harness.pool.context import PoolContext
from harness.pool.fence import claim
from harness.pool.lease import Lease
from harness.pool.members import Member
from harness.pool.notifications import run_program
from harness.pool.opener import ReachedDevice, identify
from harness.pool.owner import this_process
from harness.pool.records import DeviceRow, LeaseRow, RepairKind
from harness.pool.requirement import OnProgress, ignore_progress
from harness.pool.states import Event

log = logging.getLogger(__name__)

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
_MAX_THREADS = 8
_HELD_S = 60.0
"""Longest time between looks at whether a device that answers can be claimed again."""

Probation = Callable[[Device], None]
"""Probation run; raises a `HarnessError` if the device fails it."""

_BYTES = 4 << 20
_ROUNDS = 3
_TIMEOUT_S = 120.0


def standard_probation(device: Device) -> None:
    """Check that files survive the way there and back, that commands answer, and the boot lasts."""
    with action_named(PROBATION):
        deadline = Deadline.for_device(device.serial, PROBATION, _TIMEOUT_S)
        ensure_scripts(device, deadline)
        boot = device.boot_id(timeout_s=deadline.remaining())
        incoming = f"{device.work_root}/incoming"  # leftovers of interruptions in it are cleared
        device.shell(["mkdir", "-p", incoming], timeout_s=deadline.remaining())
        remote = f"{incoming}/probation.{secrets.token_hex(8)}"
        try:
            for _ in range(_ROUNDS):
                _round_trip(device, remote, deadline)
        finally:
            device.shell(["rm", "-f", remote], timeout_s=30.0, check=False)
        for _ in range(_ROUNDS):
            word = secrets.token_hex(16)
            answer = device.shell(["echo", word], timeout_s=deadline.remaining()).stdout
            if answer != f"{word}\n":
                raise RuntimeOutputError(device.serial, f"it answered {answer!r} to `echo {word}`")
        if device.boot_id(timeout_s=deadline.remaining()) != boot:
            raise DeviceLostError(device.serial, PROBATION, "it rebooted")


def _round_trip(device: Device, remote: str, deadline: Deadline) -> None:
    content = os.urandom(_BYTES)
    sha256, rest = hashlib.sha256(content).hexdigest(), len(content)

    def check(digest: str) -> None:
        if digest != sha256:
            raise DeploymentCorruptError(device.serial, "a probation file", sha256, digest)

    def count(received: int) -> None:
        nonlocal rest
        rest -= received
        if rest < 0:  # a device may send without end
            check("")

    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        local = Path(folder) / "sent"
        local.write_bytes(content)
        device.push(local, remote, timeout_s=deadline.remaining(), mode=0o644)
        incoming, name = posixpath.split(remote)
        hashes = hashes_on(device, incoming, [name], timeout_s=deadline.remaining())
        check(hashes.get(name, ""))
        back = Path(folder) / "back"
        device.pull(remote, back, timeout_s=deadline.remaining(), on_progress=count)
        check(hashlib.sha256(back.read_bytes()).hexdigest())


class Upkeep:
    """Repairs devices of one pool that are not ready, each under a lease of its own.

    So no two processes work on one device, and the next process that waits for a device goes on
    where one that ended stopped.
    """

    def __init__(self, context: PoolContext) -> None:
        self._context = context
        self._ledger = context.ledger
        self.probation = standard_probation
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def start(self, due: Iterable[str], members: Mapping[str, Member]) -> None:
        """Start the repairs of the devices with these keys, each in a thread."""
        for key in due:
            if key not in members:
                continue
            with self._lock:
                if key in self._busy or len(self._busy) >= _MAX_THREADS:
                    continue
                self._busy.add(key)
            threading.Thread(
                target=self._in_thread,
                args=(members[key], key),
                name=f"qnnfarm-upkeep-{members[key].name}",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Start nothing more; a step that runs is not cut off."""
        self._stop.set()

    def repair(
        self,
        member: Member,
        key: str,
        *,
        force: bool = False,
        from_others: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """Recover a device, or try it on probation, if that is due and nobody else does it.

        Args:
            force: do it before it is due.
            from_others: recover it even if a holder of another ledger has it.
            on_progress: called with each step and its result.
        """
        lease = self._ledger.begin_repair(key, this_process(), force=force)
        if lease is None:
            return
        device = self._ledger.rows([key])[key]
        probation = lease.purpose == RepairKind.PROBATION
        try:
            self._context.heartbeat.start([lease])
            if probation:
                on_progress("its probation run: files there and back, commands, no reboot")
                self._run_probation(member, device, lease)
            else:
                recovery = Recovery(
                    self._context, member, lease, self._stop.is_set, on_progress, from_others
                )
                self._recover(recovery, member, device, lease)
        except BaseException as error:
            if not probation and not isinstance(error, Exception):  # Ctrl-C
                self._ledger.interrupt_repair(key, lease.grant)
                raise
            event = Event.NOT_PASSED if probation else Event.GAVE_UP
            self._end(device, lease.grant, event, "it was interrupted")
            raise
        finally:
            self._context.heartbeat.stop(lease.grant)

    def _in_thread(self, member: Member, key: str) -> None:
        try:
            self.repair(member, key)
        except HarnessError as error:
            log.warning("upkeep of %s: %s", member.name, error)
        finally:
            with self._lock:
                self._busy.discard(key)

    def _recover(
        self, recovery: "Recovery", member: Member, device: DeviceRow, lease: LeaseRow
    ) -> None:
        try:
            reached = recovery.run(device)
        except HarnessError as error:
            if self._stop.is_set():
                self._ledger.interrupt_repair(lease.key, lease.grant)
            else:
                most_s = _HELD_S if isinstance(error, NO_STEP_HELPS) else math.inf
                self._end(device, lease.grant, Event.GAVE_UP, one_line(str(error)), most_s)
            return
        if reached.key != lease.key:
            reason = f"another device answers at {member.spec}"
            self._end(device, lease.grant, Event.GAVE_UP, reason)
        else:
            self._end(device, lease.grant, Event.RECOVERED, "it answers again")
        self._ledger.record_found(reached.key, member.name, str(member.spec), reached.facts)

    def _run_probation(self, member: Member, device: DeviceRow, row: LeaseRow) -> None:
        try:
            lease = Lease(self._context, row.grant, [claim(self._context, row, member)])
            self.probation(lease.device)
            lease.device.fence.give_back()
        except HarnessError as error:
            reason, most_s = one_line(str(error)), math.inf
            if isinstance(error, NO_STEP_HELPS):
                most_s = _HELD_S
            elif isinstance(error, LeaseLostError) or error.is_infrastructure:
                most_s = 1.0  # it says nothing about the device, which is tried again at once
            else:
                reason = f"its probation run failed: {reason}"
            self._end(device, row.grant, Event.NOT_PASSED, reason, most_s)
        else:
            self._end(device, row.grant, Event.PASSED, "it passed its probation run")

    def _end(
        self,
        device: DeviceRow,
        grant: str,
        event: Event,
        reason: str,
        most_s: float = math.inf,
    ) -> None:
        """End a repair; the next one is due after the backoff, and after `most_s` at the latest."""
        config = self._context.config
        policy = config.quarantine if event is Event.NOT_PASSED else config.recovery
        retry_in_s = min(policy.backoff(device.attempts), most_s)
        self._ledger.end_repair(device.key, grant, event, reason, retry_in_s=retry_in_s)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a device, step by step, under a lease of its own.

    Attributes:
        lease: the repair's.
        stopped: whether to give up early.
        on_progress: called with each step before it is taken, and with its result.
        from_others: whether to take the device from a holder of another ledger.
    """

    context: PoolContext
    member: Member
    lease: LeaseRow
    stopped: Callable[[], bool]
    on_progress: OnProgress
    from_others: bool

    def run(self, device: DeviceRow) -> ReachedDevice:
        """Take the steps until the device answers.

        A recovery that was cut off goes on with the step that it had begun. For a device that was
        never reached, the only step is `reconnect`; for one that answers, but cannot be claimed
        (`NO_STEP_HELPS`), none is taken.
        """
        self.on_progress("asking whether it answers")
        try:
            return self._wait_for_answer("look", 0.0)
        except NO_STEP_HELPS:
            raise
        except HarnessError as error:
            last = f"look: {one_line(str(error))}"
        config = self.context.config.recovery
        steps, patience_s = config.steps, config.return_timeout_s
        if not (device.leases or device.facts.soc):
            steps, patience_s = ("reconnect",) if "reconnect" in steps else steps, 0.0
        first = steps.index(device.step) if device.step in steps else 0
        for step in steps[first:]:
            self._check_stopped()
            self.context.ledger.record_step(self.lease.key, self.lease.grant, step)
            self.on_progress(self._announcement(step, patience_s))
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
        if self.stopped():
            raise PoolError("recovery was interrupted")

    def _record(self, step: str, text: str) -> None:
        self.context.ledger.add_history(self.lease.key, f"recovery: {step}", text)
        self.on_progress(f"{step}: {text}")

    def _announcement(self, step: StepName, patience_s: float) -> str:
        text, config = f"{step}: {_DESCRIPTIONS[step]}", self.context.config.recovery
        limits = {"reboot": config.reboot_timeout_s, "power_cycle": config.power_cycle_timeout_s}
        if step in limits:
            text += f", {limits[step]:g} s at most"
        return f"{text}; then it has {patience_s:g} s to answer" if patience_s else text

    def _wait_for_answer(self, step: str, patience_s: float) -> ReachedDevice:
        """Wait until the device answers and can be claimed."""
        deadline = time.monotonic() + patience_s
        while True:
            self.context.opener.forget(self.member)
            try:
                device = self.context.opener.open(self.member)
                reached = identify(self.member, device, self.context.ledger, timeout_s=_ANSWER_S)
                if reached.key == self.lease.key:
                    self._try_claim()
            except HarnessError as error:
                if (
                    isinstance(error, NO_STEP_HELPS)
                    or time.monotonic() >= deadline
                    or self.stopped()
                ):
                    raise
                time.sleep(_POLL_S)
                continue
            self._record(step, "it answers")
            return reached

    def _try_claim(self) -> None:
        with suppress(LeaseLostError):
            of_others = self.from_others
            claim(self.context, self.lease, self.member, from_others=of_others).give_back()

    def _take(self, step: StepName) -> None:
        match step:
            case "reconnect":
                self._reconnect()
            case "adb_server":
                self._restart_server()
            case "reboot":
                device = self.context.opener.open(self.member)
                device.reboot(timeout_s=self.context.config.recovery.reboot_timeout_s)
            case "power_cycle":
                self._power_cycle()

    def _reconnect(self) -> None:
        serial = self._adb_serial
        if not serial:
            return
        server = ensure_server(trusted_users=self.context.config.adb_server.trusted_users)
        if TCP_SERIAL.fullmatch(serial):
            server.disconnect(serial)
            # A failure is not the end of the step: a device that boots gets the time for it, as
            # waiting for its answer connects again.
            with suppress(DeviceConnectError, DeviceTimeoutError):
                server.connect(serial)
        else:
            _ask(server.address, f"host-serial:{serial}:reconnect")

    def _restart_server(self) -> None:
        own, config = self._adb_serial, self.context.config.adb_server
        if own is None:
            self.context.opener.restart_server(self.member)
            return
        others: list[str] = []
        address = server_address()
        if is_taken(address):
            if not config.ours:
                raise PoolError("not taken: the configuration does not say that it is ours")
            if self.context.ledger.in_use(besides=self.lease.key):
                raise PoolError("not taken: it serves devices that are in use")
            others = _tcp_devices(config.trusted_users)
            _kill(address)
        server = ensure_server(address, trusted_users=config.trusted_users)
        for serial in others:  # a new server finds devices on USB by itself, but not these
            if serial != own:
                with suppress(DeviceConnectError, DeviceTimeoutError, DeviceUnauthorizedError):
                    server.connect(serial, timeout_s=_ANSWER_S)
        if TCP_SERIAL.fullmatch(own):
            server.connect(own)

    def _power_cycle(self) -> None:
        member, config = self.member, self.context.config
        timeout_s = config.recovery.power_cycle_timeout_s
        command = member.power_cycle or config.recovery.power_cycle
        if command:
            run_program(fill_placeholders(command, member, self.lease.key), timeout_s)
            return
        spec = member.spec
        try:
            device_types()[spec.type].power_cycle(spec)
        except DeviceUnsupportedError as error:
            raise PoolError(f"not taken: {error.reason}") from None

    @property
    def _adb_serial(self) -> str | None:
        """Its serial at this host's adb server; `None` if it is not reached through it."""
        return device_types()[self.member.spec.type].preview(self.member.spec).adb_serial


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
    while is_taken(address):
        if time.monotonic() > deadline:
            raise AdbServerError(str(address), "does not end")
        with suppress(StreamClosed, FailReply, ServerUnreachable, DeadlineExceeded):
            query(address, "host:kill", Deadline(_ANSWER_S))
        time.sleep(0.05)
