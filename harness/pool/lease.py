"""A lease: devices for one holder, until it releases them or ends."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from harness.clock import Deadline
from harness.errors import (
    DeviceError,
    HarnessError,
    LeaseLostError,
    LedgerError,
    WrongUseError,
)
from harness.pool.context import PoolContext
from harness.pool.failure_policy import FailureReport
from harness.pool.fence import ClaimedDevice
from harness.pool.heartbeat import LeaseTerm
from harness.pool.leased_device import LeasedDevice

_SWEEP_S = 30.0


class Lease:
    """Devices of a pool, held until `release` (or the end of a `with` block, or of the process).

    A `HarnessError` that leaves the `with` block is reported to the pool.
    """

    def __init__(
        self, context: PoolContext, term: LeaseTerm, devices: Sequence[ClaimedDevice]
    ) -> None:
        self._context = context
        self._leases = context.ledger.leases
        self._term = term
        self._process = os.getpid()
        self._devices = tuple(LeasedDevice(device, self) for device in devices)
        self._lost = ""
        self._released = False
        self._reported: list[HarnessError] = []
        self._release_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Lease({', '.join(d.member for d in self._devices)}; token {self.token})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for device in self._devices:
                device.dirty = True
        try:
            if isinstance(error, HarnessError) and not isinstance(error, LeaseLostError):
                self.report(error)
        finally:
            self.release()

    @property
    def token(self) -> int:
        """Fencing token, higher than that of any earlier lease."""
        return self._term.token

    @property
    def devices(self) -> tuple[LeasedDevice, ...]:
        """All leased devices."""
        return self._devices

    @property
    def device(self) -> LeasedDevice:
        """The only leased device.

        Raises:
            WrongUseError: there are several.
        """
        if len(self._devices) != 1:
            raise WrongUseError(f"the lease has {len(self._devices)} devices: use `devices`")
        return self._devices[0]

    def check(self) -> None:
        """Check whether the lease still holds, by this process's own clock alone.

        Raises:
            LeaseLostError: it does not.
        """
        if self._released:
            raise self._lost_error("it was released")
        if os.getpid() != self._process:
            raise self._lost_error("it belongs to the process that this one was forked from")
        if self._lost:
            raise self._lost_error(self._lost)
        if self._context.clock.boottime() >= self._term.until:
            raise self.lose("this process slept for longer than its heartbeat is good for")

    def lose(self, reason: str) -> LeaseLostError:
        """Give the lease up as lost, and return the error to raise.

        The error says who ended the lease if the ledger knows, else `reason`.
        """
        if not self._lost:
            with suppress(LedgerError):
                self._lost = self._leases.why_lost(self.token, [d.key for d in self._devices])
            self._lost = self._lost or reason
        self._context.heartbeat.stop(self._term)
        return self._lost_error(self._lost)

    def report(self, failure: HarnessError) -> None:
        """Report a failure to the pool; what it says about the device decides what comes next.

        A device that has to be reached anew is recovered after the release; one with too many
        failures is quarantined. Failures that say nothing about the device change nothing.
        """
        if any(failure is reported for reported in self._reported):
            return
        self._reported.append(failure)
        report = FailureReport.of(failure)
        for device in self._concerned(failure):
            if report.weight or report.recover:
                self._leases.report(device.key, self.token, report)

    def release(self) -> None:
        """Give the devices back; does nothing if that was done.

        Commands that were cut off are ended on the device first. If that fails, the device is
        recovered before the next holder gets it.
        """
        with self._release_lock:
            if self._released:
                return
            try:
                for device in self._devices:
                    if device.dirty and not self._lost:
                        self._sweep(device)
            finally:
                self._context.heartbeat.stop(self._term)
                self._released = True
                self._leases.release(
                    self.token,
                    [device.key for device in self._devices],
                    unused=[d.key for d in self._devices if not d.used],
                )
                self._context.changes.notify()

    def _sweep(self, device: LeasedDevice) -> None:
        deadline = Deadline.for_device(device.serial, "cleaning up after a lease", _SWEEP_S)
        try:
            device.fence.sweep(device.unleased, deadline)
        except LeaseLostError as error:
            self._lost = error.reason
        except HarnessError as error:
            report = FailureReport.of(error, recover=True)
            self._leases.report(device.key, self.token, report)

    def _concerned(self, failure: HarnessError) -> Sequence[LeasedDevice]:
        if isinstance(failure, DeviceError) and len(self._devices) > 1:
            return [device for device in self._devices if device.serial == failure.serial]
        if len(self._devices) == 1 or failure.is_infrastructure:
            return self._devices
        return ()

    def _lost_error(self, reason: str) -> LeaseLostError:
        names = ", ".join(device.member for device in self._devices)
        return LeaseLostError(names, self.token, reason)
