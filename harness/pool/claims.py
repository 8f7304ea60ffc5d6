"""Taking a granted device: it is the one that is meant, and its fence holds our token."""

from dataclasses import dataclass

from harness.deploy.budget import Budget
from harness.deploy.scripts import ensure_scripts
from harness.devices.base import Device
from harness.errors import DeviceCommandError, DeviceFullError, NoDeviceError
from harness.pool.fence import Fence, OtherDeviceError, claim, claim_known
from harness.pool.leased_device import Hold, LeasedDevice
from harness.pool.members import Member
from harness.pool.naming import CLAIMING, SCRIPTS, named
from harness.pool.opening import Opener, survey
from harness.pool.register import Register
from harness.pool.rows import KnownFence


@dataclass(frozen=True, slots=True)
class Held:
    """A device whose fence holds the token of a lease."""

    member: str
    key: str
    device: Device
    fence: Fence

    def under(self, hold: Hold) -> LeasedDevice:
        """The device as the holder of the lease may use it."""
        return LeasedDevice(self.member, self.key, self.device, self.fence, hold)


class Claims:
    """Raises fences, in one command where the ledger remembers the device's.

    While its fence has the id that it had, a device is neither another nor wiped, and need not be
    asked who it is.
    """

    def __init__(self, register: Register, opener: Opener, *, timeout_s: float) -> None:
        self._register = register
        self._opener = opener
        self._timeout_s = timeout_s

    def claim(self, token: int, key: str, member: Member, *, min_free_bytes: int = 0) -> Held:
        """Raise the fence of a device that was granted.

        Raises:
            HigherTokenError: the device knows of a higher token.
            DeviceFullError: less than `min_free_bytes` is free.
            NoDeviceError: another device answers at its address.
            DeviceError: it fails.
        """
        device = self._opener.open(member)
        budget = Budget(device.serial, CLAIMING, self._timeout_s)
        fence = self._fence(token, key, member, device, budget)
        if min_free_bytes:
            free = device.free_bytes(timeout_s=budget.left())
            self._register.set_free_bytes(key, free)
            if free is not None and free < min_free_bytes:
                raise DeviceFullError(device.serial, device.work_root, min_free_bytes, free)
        return Held(member.name, key, device, fence)

    def _fence(self, token: int, key: str, member: Member, device: Device, budget: Budget) -> Fence:
        known = self._register.fence_of(key)
        if known.id and known.root:
            try:
                return claim_known(device, token, known, budget)
            except (OtherDeviceError, DeviceCommandError):
                pass  # wiped, or another device: the long way says
        reached = survey(member, device, timeout_s=budget.left())
        if reached.key != key:
            self._register.register_found(reached.key, member.name, str(member.spec), reached.facts)
            other = reached.key.removeprefix("hardware:")
            raise NoDeviceError(member.name, (f"{device.serial} is another device now: {other}",))
        with named(SCRIPTS):
            scripts = ensure_scripts(device, budget)
        fence = claim(device, token, scripts, budget)
        self._register.set_fence(key, KnownFence(fence.id, fence.root))
        return fence
