"""Background repair of devices by the processes that wait for one: recovery and probation."""

import hashlib
import logging
import os
import posixpath
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.clock import Deadline
from harness.deploy.digests import hashes_on
from harness.deploy.scripts import ensure_scripts
from harness.devices.device import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceLostError,
    HarnessError,
    LeaseLostError,
    RuntimeOutputError,
    one_line,
)
from harness.pool.action_names import PROBATION, action_named
from harness.pool.context import PoolContext
from harness.pool.lease import Lease
from harness.pool.members import Member
from harness.pool.owner import this_process
from harness.pool.records import DeviceRow, LeaseRow, RepairKind
from harness.pool.recovery import NO_STEP_HELPS, Recovery
from harness.pool.states import Event
from harness.pool.status import OnProgress, ignore_progress

log = logging.getLogger(__name__)

_MAX_THREADS = 8
_HELD_S = 60.0
"""Longest time between looks at whether a device that answers can be claimed again."""

Probation = Callable[[Device], None]
"""Probation run; raises a `HarnessError` if the device fails it."""

_BYTES = 4 << 20
_ROUNDS = 3
_TIMEOUT_S = 120.0


def standard_probation(device: Device) -> None:
    """Check that files survive the way there and back, that commands answer, and the boot lasts.

    Raises:
        DeploymentCorruptError: a file came back changed.
        RuntimeOutputError: a command gave a wrong answer.
        DeviceError: the device failed otherwise.
    """
    with action_named(PROBATION):
        _check_device(device)


def _check_device(device: Device) -> None:
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
    expected = hashlib.sha256(content).hexdigest()
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        local = Path(folder) / "sent"
        local.write_bytes(content)
        device.push(local, remote, timeout_s=deadline.remaining(), mode=0o644)
        incoming, name = posixpath.split(remote)
        hashes = hashes_on(device, incoming, [name], timeout_s=deadline.remaining())
        digest = hashes.get(name, "")
        if digest != expected:
            raise DeploymentCorruptError(device.serial, "a probation file", expected, digest)
        back = Path(folder) / "back"
        left = len(content)

        def count(received: int) -> None:
            nonlocal left
            left -= received
            if left < 0:  # a device may send without end
                raise DeploymentCorruptError(device.serial, "a probation file", expected, "")

        device.pull(remote, back, timeout_s=deadline.remaining(), on_progress=count)
        digest = hashlib.sha256(back.read_bytes()).hexdigest()
        if digest != expected:
            raise DeploymentCorruptError(device.serial, "a probation file", expected, digest)


class Upkeep:
    """Repairs devices of one pool that are not ready, each under a lease of its own.

    So no two processes work on one device, and the next process that waits for a device goes on
    with what a process that ended left undone.
    """

    def __init__(self, context: PoolContext, *, probation: Probation = standard_probation) -> None:
        self._context = context
        self._ledger = context.ledger
        self.probation = probation
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def start(self, members: Mapping[str, Member]) -> None:
        """Start the repairs that are due, each in a thread."""
        for key in self._ledger.due_repairs():
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
                self._run_probation(member, device, lease.token)
            else:
                recovery = Recovery(
                    self._context,
                    member,
                    lease,
                    self._stop.is_set,
                    on_progress,
                    from_others=from_others,
                )
                self._recover(recovery, member, device, lease)
        except BaseException as error:
            if not probation and not isinstance(error, Exception):  # Ctrl-C
                self._ledger.interrupt_repair(key, lease.token)
                raise
            event = Event.NOT_PASSED if probation else Event.GAVE_UP
            self._end(device, lease.token, event, "it was interrupted")
            raise
        finally:
            self._context.heartbeat.stop(lease.token)
            self._context.changes.notify()

    def _in_thread(self, member: Member, key: str) -> None:
        try:
            self.repair(member, key)
        except HarnessError as error:
            log.warning("upkeep of %s: %s", member.name, error)
        finally:
            with self._lock:
                self._busy.discard(key)

    def _recover(
        self, recovery: Recovery, member: Member, device: DeviceRow, lease: LeaseRow
    ) -> None:
        try:
            reached = recovery.run(device)
        except HarnessError as error:
            if self._stop.is_set():
                self._ledger.interrupt_repair(lease.key, lease.token)
            else:
                answers = isinstance(error, NO_STEP_HELPS)
                retry_in_s = min(self._backoff(device, Event.GAVE_UP), _HELD_S) if answers else None
                reason = one_line(str(error))
                self._end(device, lease.token, Event.GAVE_UP, reason, retry_in_s=retry_in_s)
            return
        if reached.key != lease.key:
            reason = f"another device answers at {member.spec}"
            self._end(device, lease.token, Event.GAVE_UP, reason)
        else:
            self._end(device, lease.token, Event.RECOVERED, "it answers again")
        self._ledger.record_found(reached.key, member.name, str(member.spec), reached.facts)

    def _run_probation(self, member: Member, device: DeviceRow, token: int) -> None:
        try:
            claimed = self._context.claims.claim(token, device.key, member)
            lease = Lease(self._context, token, [claimed])
            self.probation(lease.device)
            lease.device.fence.give_back(lease.device.unleased)
        except HarnessError as error:
            reason, retry_in_s = f"its probation run failed: {one_line(str(error))}", None
            if isinstance(error, NO_STEP_HELPS):
                reason, retry_in_s = one_line(str(error)), _HELD_S
            elif isinstance(error, LeaseLostError) or error.is_infrastructure:
                # It says nothing about the device, which is tried again at once.
                reason, retry_in_s = one_line(str(error)), 1.0
            self._end(device, token, Event.NOT_PASSED, reason, retry_in_s=retry_in_s)
        else:
            self._end(device, token, Event.PASSED, "it passed its probation run")

    def _end(
        self,
        device: DeviceRow,
        token: int,
        event: Event,
        reason: str,
        *,
        retry_in_s: float | None = None,
    ) -> None:
        if retry_in_s is None:
            retry_in_s = self._backoff(device, event)
        self._ledger.end_repair(device.key, token, event, reason, retry_in_s=retry_in_s)

    def _backoff(self, device: DeviceRow, event: Event) -> float:
        config = self._context.config
        policy = config.quarantine if event is Event.NOT_PASSED else config.recovery
        return policy.backoff(device.attempts)
