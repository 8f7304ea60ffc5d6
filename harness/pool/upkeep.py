"""Recovery and probation of devices, in the background of whoever waits for one."""

import hashlib
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from harness.clock import Clock, Deadline
from harness.deploy.scripts import ensure_scripts
from harness.devices.base import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceLostError,
    HarnessError,
    LeaseLostError,
    RuntimeOutputError,
    one_line,
)
from harness.pool.action_names import PROBATION, named
from harness.pool.config import PoolConfig
from harness.pool.fence import Claims, Held, HigherTokenError
from harness.pool.heartbeat import Heart, Pulse
from harness.pool.lease import Lease
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.opening import Opener, Reached
from harness.pool.owner import this_process
from harness.pool.records import LeaseRow
from harness.pool.recovery import Recovery
from harness.pool.states import Event
from harness.pool.status import Tell, silent

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 8
Probation = Callable[[Device], None]
"""Raises a `HarnessError` if the device does not pass."""

_BYTES = 4 << 20
_ROUNDS = 3
_TIMEOUT_S = 120.0


def standard_probation(device: Device) -> None:
    """Files survive the way there and back, commands answer rightly, and it does not reboot.

    Raises:
        DeploymentCorruptError: a file came out as another.
        RuntimeOutputError: a command answered wrongly.
        DeviceError: it failed otherwise.
    """
    with named(PROBATION):
        _try_out(device)


def _try_out(device: Device) -> None:
    deadline = Deadline.for_device(device.serial, PROBATION, _TIMEOUT_S)
    ensure_scripts(device, deadline)
    boot = device.boot_id(timeout_s=deadline.remaining())
    incoming = f"{device.work_root}/incoming"  # where what an interruption leaves is cleared away
    device.shell(["mkdir", "-p", incoming], timeout_s=deadline.remaining())
    remote = f"{incoming}/probation.{secrets.token_hex(8)}"
    try:
        for _ in range(_ROUNDS):
            _round_trip(device, remote, deadline)
    finally:
        device.shell(["rm", "-f", remote], timeout_s=30.0, check=False)
    for _ in range(_ROUNDS):
        word = secrets.token_hex(16)
        said = device.shell(["echo", word], timeout_s=deadline.remaining()).stdout
        if said != f"{word}\n":
            raise RuntimeOutputError(device.serial, f"it answered {said!r} to `echo {word}`", said)
    if device.boot_id(timeout_s=deadline.remaining()) != boot:
        raise DeviceLostError(device.serial, PROBATION, "it rebooted")


def _round_trip(device: Device, remote: str, deadline: Deadline) -> None:
    content = os.urandom(_BYTES)
    expected = hashlib.sha256(content).hexdigest()
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        local = Path(folder) / "sent"
        local.write_bytes(content)
        device.push(local, remote, timeout_s=deadline.remaining(), mode=0o644)
        answer = device.shell(["sha256sum", remote], timeout_s=deadline.remaining()).stdout
        found = answer.partition(" ")[0]
        if found != expected:
            raise DeploymentCorruptError(device.serial, "a probation file", expected, found)
        back = Path(folder) / "back"
        device.pull(remote, back, timeout_s=deadline.remaining())
        found = hashlib.sha256(back.read_bytes()).hexdigest()
        if found != expected:
            raise DeploymentCorruptError(device.serial, "a probation file", expected, found)


class Upkeep:
    """Works on the devices of one pool that are not ready, each under a lease of its own.

    So no two processes work on one device, and what a process that ends leaves undone is done by
    the next that waits.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        heart: Heart,
        opener: Opener,
        config: PoolConfig,
        claims: Claims,
        changed: Callable[[], None],
        *,
        probation: Probation = standard_probation,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._heart = heart
        self._opener = opener
        self._config = config
        self._claims = claims
        self._changed = changed
        self.probation = probation
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def start(self, members: Mapping[str, Member]) -> None:
        """Begin what is due, in threads that end with it."""
        for key in self._ledger.repairs.due():
            if key not in members:
                continue
            with self._lock:
                if key in self._busy or len(self._busy) >= _MOST_AT_ONCE:
                    continue
                self._busy.add(key)
            threading.Thread(
                target=self._in_thread,
                args=(members[key], key),
                name=f"qnnfarm-upkeep-{members[key].name}",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Give up what has not begun; a step that runs is not cut off."""
        self._stop.set()

    def work(self, member: Member, key: str, *, force: bool = False, tell: Tell = silent) -> None:
        """Recover a device, or try it, if that is due and nobody else does it.

        Args:
            tell: told of each step as it begins, and of how it went.
        """
        known = self._ledger.devices.rows([key]).get(key)
        attempts = known.attempts if known else 0
        row = self._ledger.repairs.begin(key, this_process(), force=force)
        if row is None:
            return
        pulse = Pulse(row.token, 1, row.beat + row.ttl)
        try:
            self._heart.keep(pulse)
            if row.purpose == "probation":
                tell("its probation run: files there and back, commands, no reboot")
                self._probation(member, row, pulse)
            else:
                self._recovery(member, row, tell)
        except BaseException as error:
            probation = row.purpose == "probation"
            if not probation and not isinstance(error, Exception):  # Ctrl-C
                self._ledger.repairs.put_down(key, pulse.token)
                raise
            event = Event.NOT_PASSED if probation else Event.GAVE_UP
            backoff = self._config.quarantine.rule if probation else self._config.recovery
            wait = backoff.backoff(attempts)
            reason = "it was interrupted"
            self._ledger.repairs.end(key, pulse.token, event, reason, retry_in_s=wait)
            raise
        finally:
            self._heart.drop(pulse)
            self._changed()

    def _in_thread(self, member: Member, key: str) -> None:
        try:
            self.work(member, key)
        except HarnessError as error:
            log.warning("upkeep of %s: %s", member.name, error)
        finally:
            with self._lock:
                self._busy.discard(key)

    def _recovery(self, member: Member, row: LeaseRow, tell: Tell) -> None:
        device = self._ledger.devices.rows([row.key])[row.key]

        def record(step: str, text: str) -> None:
            self._ledger.devices.note(row.key, f"recovery: {step}", text)
            tell(f"{step}: {text}")

        recovery = Recovery(
            member,
            row.key,
            self._opener,
            self._config,
            lambda reached: self._prove(member, row, reached),
            lambda: self._server_in_use(row),
            record,
            tell,
            self._stop.is_set,
            lambda step: self._ledger.repairs.reached(row.key, row.token, step),
            device.step,
        )
        try:
            reached = recovery.run(gently=not (device.leases or device.facts.soc))
        except HarnessError as error:
            if self._stop.is_set():
                self._ledger.repairs.put_down(row.key, row.token)
                return
            wait = self._config.recovery.backoff(device.attempts)
            reason = one_line(str(error))
            self._ledger.repairs.end(row.key, row.token, Event.GAVE_UP, reason, retry_in_s=wait)
            return
        if reached.key != row.key:
            reason = f"another device answers at {member.spec}"
            wait = self._config.recovery.backoff(device.attempts)
            self._ledger.repairs.end(row.key, row.token, Event.GAVE_UP, reason, retry_in_s=wait)
        else:
            self._ledger.repairs.end(row.key, row.token, Event.RECOVERED, "it answers again")
        self._ledger.devices.register_found(
            reached.key, member.name, str(member.spec), reached.facts
        )

    def _probation(self, member: Member, row: LeaseRow, pulse: Pulse) -> None:
        device = self._ledger.devices.rows([row.key])[row.key]
        try:
            held = self._claim(member, row.key, pulse)
            lease = Lease(
                self._ledger.leases, self._clock, self._heart, pulse, [held], self._changed
            )
            self.probation(lease.device)
        except (HarnessError, HigherTokenError) as error:
            event, wait = Event.NOT_PASSED, self._config.quarantine.rule.backoff(device.attempts)
            reason = f"its probation run failed: {one_line(str(error))}"
            if isinstance(error, HarnessError) and error.is_infrastructure:
                # It says nothing about the device, which is tried again at once.
                reason, wait = one_line(str(error)), 1.0
        else:
            event, reason, wait = Event.PASSED, "it passed its probation run", 0.0
        self._ledger.repairs.end(row.key, pulse.token, event, reason, retry_in_s=wait)

    def _claim(self, member: Member, key: str, pulse: Pulse) -> Held:
        try:
            return self._claims.claim(pulse.token, key, member)
        except HigherTokenError as error:
            if not self._heart.raise_token(pulse, int(error.args[0])):
                raise LeaseLostError(member.name, pulse.token, "it was taken back") from None
            return self._claims.claim(pulse.token, key, member)

    def _prove(self, member: Member, row: LeaseRow, reached: Reached) -> None:
        """A device that answers must let itself be claimed, too."""
        if reached.key == row.key:
            with suppress(HigherTokenError):
                self._claims.claim(row.token, row.key, member)

    def _server_in_use(self, row: LeaseRow) -> bool:
        return self._ledger.leases.in_use(besides=row.key)
