"""Lease of devices, and the devices as its holder uses them.

The ledger has a `LeaseRow` of each device: who holds it, under which token. `claim` makes a
`Fence` of it, raised on the device, which lets no other token through. A `Lease` renews the rows by
the `Heartbeat`, and gives its holder a `LeasedDevice` for each, which the fence guards.
"""

import os
import secrets
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from types import TracebackType
from typing import Self

from harness.clock import Deadline
from harness.deploy.scripts import CHECKING, PROBING, action_named, describe_command
from harness.devices.base import CommandResult, DeviceProperties
from harness.devices.device import Device
from harness.errors import (
    DeviceCommandError,
    DeviceError,
    DeviceTimeoutError,
    HarnessError,
    LeaseLostError,
    LedgerError,
    WrongUseError,
)
from harness.pool.context import PoolContext
from harness.pool.failure_policy import FailureReport, Work
from harness.pool.fence import Fence

_CHECK_S = 30.0
_ASK_S = 5.0
"""Time for a device to say, after a failure, whether the lease still holds there."""
_SWEEP_S = 30.0
_WATCH_S = 0.25
_LOOKS_PER_QUESTION = 40
_PROBE_S = 5.0
_PROBE_OUTPUT = 4096


class LeasedDevice(Device):
    """A device under a lease, guarded by the fence.

    Every method raises `LeaseLostError` before it touches the device if the lease is lost. Commands
    check the fence on the device itself, and transfers do so before and after: that stops a holder
    that was suspended in the middle. After each failure, and each command that ends with a status
    other than 0, the ledger and the fence are asked whether the lease still holds: the next
    holder's claim kills running commands.

    Attributes:
        member: its name in the pool.
        fence: its fence with the token of the lease.
        used: whether it was used under this lease.
        dirty: whether a command was cut off on it, so that processes may remain.
    """

    def __init__(self, fence: Fence, lease: "Lease") -> None:
        super().__init__(fence.device.runner.transport, runner=fence.device.runner)
        self.member = fence.member
        self.key = fence.key
        self.fence = fence
        self.used = False
        self.dirty = False
        self._work_root = fence.root
        self._lease = lease
        self._forwards: set[ExitStack] = set()

    def __repr__(self) -> str:
        return f"LeasedDevice({self.member!r}, token {self.fence.token})"

    @property
    def unleased(self) -> Device:
        """The device without the checks, for the pool's own work on it."""
        return self.fence.device

    def verify(self) -> None:
        """Check whether the lease still holds, by the ledger and by the fence on the device.

        A device that does not answer within 5 seconds counts as still held.
        """
        self._lease.check_ledger(self.key)
        try:
            result = self._ask_fence(_ASK_S)
        except HarnessError:
            return
        self._lost_if_fenced(result)

    def name(self, failure: HarnessError) -> None:
        """Let an error of this device say its name in the pool."""
        if isinstance(failure, DeviceError) and failure.serial == self.serial:
            failure.member = self.member

    def end_forwards(self) -> None:
        """End all forwards, with the connections through them."""
        for stack in tuple(self._forwards):
            stack.close()

    @contextmanager
    def _forwarding(self, port: int) -> Iterator[tuple[str, int]]:
        """End with the lease, with all connections through it, within a second of its loss."""
        over = threading.Event()
        with ExitStack() as stack:
            address = stack.enter_context(super()._forwarding(port))
            self._forwards.add(stack)
            watch = threading.Thread(
                target=self._watch, args=(over,), name=f"forward of {self.member}", daemon=True
            )
            watch.start()
            try:
                yield address
            finally:
                over.set()
                self._forwards.discard(stack)

    def _watch(self, over: threading.Event) -> None:
        """Look after the lease while a forward is open, which ends once it is lost."""
        looks = 0
        while not over.wait(_WATCH_S):
            looks += 1
            try:
                if looks % _LOOKS_PER_QUESTION:
                    self._lease.check_ledger(self.key)
                else:
                    self.verify()  # which is a sign of life to other ledgers, too
            except LeaseLostError:
                self.end_forwards()
                return

    def probe(self) -> str:
        """Let the device write and read a small file at once; say so if it answers, else nothing.

        A command that took too long says nothing about a device that does this.
        """
        word = secrets.token_hex(8)
        file = shlex.quote(f"{self.fence.root}/incoming/probe.{word}")
        use = f"echo {word} >{file}; cat {file}; rm -f {file}"
        script = f"{{ {use}; }} >/dev/null 2>&1; echo {word}"
        began = time.monotonic()
        with suppress(HarnessError), action_named(PROBING):
            answer = self.unleased.shell(
                self.fence.guarded(script),
                timeout_s=_PROBE_S,
                check=False,
                env=self.fence.env,
                max_output=_PROBE_OUTPUT,
            )
            if answer.stdout == f"{word}\n":
                return f"the device answered a probe within {time.monotonic() - began:.2f} s"
        return ""

    @contextmanager
    def _using(self) -> Iterator[None]:
        self._lease.check()
        self.used = True
        try:
            yield
        except HarnessError as error:
            self.dirty = True
            self.name(error)
            if error.is_infrastructure:  # nobody would answer
                self._lease.check_ledger(self.key)
            else:
                self.verify()
            raise
        except BaseException:
            self.dirty = True
            raise
        self._lease.check_ledger(self.key)

    def _naming(self, text: str) -> action_named:
        return action_named(describe_command(text, self.fence.root), failures=False)

    def _ask(self) -> None:
        self._lease.check()
        self.used = True
        self._lost_if_fenced(self._ask_fence(_CHECK_S))

    def _guarded(self, text: str) -> tuple[str, Mapping[str, str]]:
        return self.fence.guarded(text), self.fence.env

    def _judge(self, result: CommandResult) -> None:
        self._lost_if_fenced(result)
        if result.exit_status:
            self.verify()

    def _error(self, text: str, result: CommandResult) -> DeviceCommandError:
        action = describe_command(text, self.fence.root).strip("`")
        failure = super()._error(action, result)
        self.name(failure)
        return failure

    def _ask_fence(self, timeout_s: float) -> CommandResult:
        with action_named(CHECKING, failures=False):
            return self.unleased.shell(self.fence.guarded(":"), timeout_s=timeout_s, check=False)

    def _lost_if_fenced(self, result: CommandResult) -> None:
        if self.fence.was_lost(result.exit_status, result.stderr):
            raise self._lease.lose_device(self, result.stderr)


class Lease:
    """Devices of a pool, held until `release` (or the end of a `with` block, or of the process).

    A `HarnessError` that leaves the `with` block is reported to the pool. The checks raise
    `LeaseLostError`.

    Attributes:
        grant: its nonce, which no other lease has.
        devices: all leased devices.
    """

    def __init__(self, context: PoolContext, grant: str, fences: Sequence[Fence]) -> None:
        self._context = context
        self._ledger = context.ledger
        self.grant = grant
        self._process = os.getpid()
        self.devices = tuple(LeasedDevice(fence, self) for fence in fences)
        self._lost = ""
        self._released = False
        self._reported: list[HarnessError] = []
        self._failed_work: Work | None = None
        self._unreachable: set[str] = set()
        self._release_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Lease({', '.join(d.member for d in self.devices)}; token {self.token})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for device in self.devices:
                device.dirty = True
        try:
            if isinstance(error, HarnessError) and not isinstance(error, LeaseLostError):
                self.report(error)
        finally:
            self.release()

    @property
    def token(self) -> int:
        """The highest fencing token of its devices; each is higher than the device's before."""
        return max(device.fence.token for device in self.devices)

    @property
    def device(self) -> LeasedDevice:
        """The only leased device; `WrongUseError` if there are several."""
        if len(self.devices) != 1:
            raise WrongUseError(f"the lease has {len(self.devices)} devices: use `devices`")
        return self.devices[0]

    @cached_property
    def properties(self) -> tuple[DeviceProperties, ...]:
        """Each device's properties when they were first asked for."""
        return tuple(device.properties() for device in self.devices)

    @property
    def is_usable(self) -> bool:
        """False once it is lost or released, or was told that a device must be leased anew."""
        if any(failure.loses_device or failure.needs_recovery for failure in self._reported):
            return False
        with suppress(LeaseLostError):
            self.check()
            return True
        return False

    def check(self) -> None:
        """Check whether the lease still holds, by this process's own clock alone."""
        if self._released:
            raise self._lost_error("it was released")
        if os.getpid() != self._process:
            raise self._lost_error("it belongs to the process that this one was forked from")
        if self._lost:
            raise self._lost_error(self._lost)
        until = self._context.heartbeat.until(self.grant)
        if self._context.clock.boottime() >= until:
            raise self.lose(self._why_over(until))

    def _why_over(self, until: float) -> str:
        """Say why its time is over, where nobody has taken it."""
        with suppress(LedgerError):
            if not until and not self._ledger.knows(self.grant):
                return "the ledger knows no such lease: it went back to an earlier state"
        return "this process slept for longer than its heartbeat is good for"

    def check_ledger(self, key: str) -> None:
        """Check whether the ledger says that the lease still has a device."""
        self.check()
        with suppress(LedgerError):  # then the lease is good for as long as its term
            if not self._ledger.holds(self.grant, key):
                raise self.lose("the ledger gave the device to another holder")

    def verify(self) -> None:
        """Check whether the lease still holds, by the ledger and by the fences on its devices."""
        for device in self.devices:
            device.verify()

    def lose(self, reason: str) -> LeaseLostError:
        """Give the lease up as lost, and return the error to raise.

        The error names the person or process that ended the lease if the ledger has it, else gives
        `reason`.
        """
        if not self._lost:
            with suppress(LedgerError):
                self._lost = self._ledger.why_lost(self.grant, [d.key for d in self.devices])
            self._lost = self._lost or reason
        self._context.heartbeat.stop(self.grant)
        for device in self.devices:
            device.end_forwards()
        return self._lost_error(self._lost)

    def lose_device(self, device: LeasedDevice, refusal: str) -> LeaseLostError:
        """Give the lease up, as the fence on a device refuses it; see `lose`.

        The ledger records the holder, which nobody told it.

        Args:
            refusal: output of the device.
        """
        reason = device.fence.describe_loss(refusal, self._context.clock.now())
        with suppress(LedgerError):
            self._ledger.record_loss(self.grant, device.key, reason)
        return self.lose(reason)

    def report(self, failure: HarnessError, work: Work | None = None) -> str:
        """Report a failure to the pool.

        A device that must be reached again is recovered after the release; one with too many
        failures is quarantined. Failures that say nothing about the device change nothing. After a
        time limit the device is probed, for a device that answers did not cause it.

        Args:
            work: the work that failed. With it the pool tells bad work, which fails alike on
                several devices, from a bad device.

        Returns:
            Why the failure counts against the work; empty if it does not.
        """
        if self._lost or any(failure is other for other in self._reported):
            return ""  # a failure on a device that others use is not its fault
        self._reported.append(failure)
        self._failed_work = work
        blame = ""
        for device in self.devices:
            device.name(failure)
        for device in self._concerned(failure):
            answer = device.probe() if isinstance(failure, DeviceTimeoutError) else ""
            report = FailureReport.of(failure, work=work, answered=answer)
            if report.recover:
                self._unreachable.add(device.key)
            if report.weight or report.recover:
                blame = blame or self._ledger.report(device.key, self.grant, report) or ""
        return blame

    def report_success(self, work: Work) -> None:
        """Report that work ended well on the devices: its earlier failures were not its fault."""
        self._ledger.report_success(self.grant, work)

    def release(self) -> None:
        """Give the devices back; does nothing if that was done.

        Commands that were cut off are ended on the device first. If that fails, the device is
        recovered before the next holder gets it.
        """
        with self._release_lock:
            if self._released:
                return
            try:
                for device in self.devices:
                    device.end_forwards()
                    self._give_back(device)
            finally:
                self._context.heartbeat.stop(self.grant)
                self._released = True
                self._ledger.release(
                    self.grant,
                    [device.key for device in self.devices],
                    used=[d.key for d in self.devices if d.used],
                    unused=[d.key for d in self.devices if not d.used],
                )

    def _give_back(self, device: LeasedDevice) -> None:
        """End commands that were cut off, and tell other ledgers on the device that it is free."""
        if device.dirty and not self._lost and not self._sweep(device):
            return
        if device.key not in self._unreachable:
            # Also after a loss: if it was no claim that ended the lease, the fence is still ours.
            device.fence.give_back()

    def _sweep(self, device: LeasedDevice) -> bool:
        """End commands that were cut off; return whether the device let us."""
        deadline = Deadline.for_device(device.serial, "cleaning up after a lease", _SWEEP_S)
        try:
            device.fence.sweep(deadline)
        except LeaseLostError as error:
            self._lost = error.reason
        except HarnessError as error:
            report = FailureReport.of(error, recover=True, work=self._failed_work)
            self._ledger.report(device.key, self.grant, report)
            return False
        return True

    def _concerned(self, failure: HarnessError) -> Sequence[LeasedDevice]:
        if isinstance(failure, DeviceError) and len(self.devices) > 1:
            return [device for device in self.devices if device.serial == failure.serial]
        if len(self.devices) == 1 or failure.is_infrastructure:
            return self.devices
        return ()

    def _lost_error(self, reason: str) -> LeaseLostError:
        names = ", ".join(device.member for device in self.devices)
        return LeaseLostError(names, self.token, reason)
