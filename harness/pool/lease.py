"""A lease: devices for one holder, until it releases them or ends."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from harness.clock import Clock, Deadline
from harness.errors import (
    DeviceError,
    HarnessError,
    LeaseLostError,
    LedgerError,
    WrongUseError,
)
from harness.pool.failure_policy import FailureReport
from harness.pool.fence import Held
from harness.pool.heartbeat import Heart, Pulse
from harness.pool.leased_device import LeasedDevice
from harness.pool.ledger import Leases

_SWEEP_S = 30.0


class Lease:
    """Devices of a pool, held until `release` (or the end of a `with` block, or of the process).

    At the end of a `with` block, a `HarnessError` that leaves it is reported.
    """

    def __init__(
        self,
        leases: Leases,
        clock: Clock,
        heart: Heart,
        pulse: Pulse,
        held: Sequence[Held],
        on_end: Callable[[], None],
    ) -> None:
        self._leases = leases
        self._clock = clock
        self._heart = heart
        self._pulse = pulse
        self._process = os.getpid()
        self._on_end = on_end
        self._devices = tuple(
            LeasedDevice(part.member, part.key, part.device, part.fence, self) for part in held
        )
        self._lost = ""
        self._released = False
        self._reported: list[HarnessError] = []
        self._ending = threading.Lock()

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
        """The fencing token: higher than that of any earlier lease."""
        return self._pulse.token

    @property
    def devices(self) -> tuple[LeasedDevice, ...]:
        """All that are leased."""
        return self._devices

    @property
    def device(self) -> LeasedDevice:
        """The only one.

        Raises:
            WrongUseError: there are several.
        """
        if len(self._devices) != 1:
            raise WrongUseError(f"the lease has {len(self._devices)} devices: use `devices`")
        return self._devices[0]

    def check(self) -> None:
        """Say whether the lease still holds, by this process's own clock alone.

        Raises:
            LeaseLostError: it does not.
        """
        if self._released:
            raise self._error("it was released")
        if os.getpid() != self._process:
            raise self._error("it belongs to the process that this one was forked from")
        if self._lost:
            raise self._error(self._lost)
        if self._clock.boottime() >= self._pulse.until:
            raise self.lose("this process slept for longer than its heartbeat is good for")

    def lose(self, reason: str) -> LeaseLostError:
        """The lease is lost for good; gives the error to raise.

        It says who ended the lease, if the ledger knows, else `reason`.
        """
        if not self._lost:
            self._lost = self._ended_by() or reason
        self._heart.drop(self._pulse)
        return self._error(self._lost)

    def report(self, failure: HarnessError) -> None:
        """Tell the pool of a failure: what it says of the device decides what comes next.

        A device that has to be reached anew is recovered after the release; one with too many
        failures is quarantined. Failures that say nothing of the device change nothing.
        """
        if any(failure is known for known in self._reported):
            return
        self._reported.append(failure)
        report = FailureReport.of(failure)
        for device in self._concerned(failure):
            if report.weight or report.recover:
                self._leases.report(device.key, self.token, report)

    def release(self) -> None:
        """Give the devices back; fine if that was done, or if the lease is lost.

        What was cut off on a device is ended there first. If that fails the device is recovered
        before the next holder gets it.
        """
        with self._ending:
            if self._released:
                return
            try:
                for device in self._devices:
                    if device.dirty and not self._lost:
                        self._sweep(device)
            finally:
                self._heart.drop(self._pulse)
                self._released = True
                self._leases.release(
                    self.token,
                    [device.key for device in self._devices],
                    unused=[d.key for d in self._devices if not d.used],
                )
                self._on_end()

    def _ended_by(self) -> str:
        with suppress(LedgerError):
            return self._leases.why_lost(self.token, [device.key for device in self._devices])
        return ""

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

    def _error(self, reason: str) -> LeaseLostError:
        names = ", ".join(device.member for device in self._devices)
        return LeaseLostError(names, self.token, reason)
