"""Commands hold a lease on the device that they use: two on one phone would measure each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.console import tell
from harness.errors import LeaseTimeoutError, one_line

if TYPE_CHECKING:
    from harness.devices.base import Device

_AT_ONCE_S = 1.0


@contextmanager
def leased(name: str | None, *, wait_s: float, purpose: str) -> Iterator["Device"]:
    """The device of that name, for this process alone while the block lasts.

    Args:
        name: as `DeviceSpec.parse` has it; `None` is `$ANDROID_SERIAL`, or the only one.
        wait_s: for how long to wait for it if somebody else holds it. A device that is out for
            another reason is not waited for.

    Raises:
        LeaseTimeoutError: somebody held it for longer, or it is out.
        DeviceSpecError, NoDeviceError, SeveralDevicesError: no device is meant, or several.
        UnknownVirtualDeviceError: no virtual device of that name was made.
        WrongUseError: a virtual device's name, without saying that it is one.
        HarnessError: it cannot be reached.
    """
    from harness.devices.devices import Devices
    from harness.devices.spec import DeviceSpec
    from harness.pool.pool import Pool
    from harness.pool.requirement import Requirement
    from harness.pool.states import MemberState

    spec = DeviceSpec.parse(name) if name else None
    with Devices() as devices, Pool.of([devices.resolve(spec)], devices=devices) as pool:

        def not_held() -> bool:
            return pool.members()[0].state is not MemberState.LEASED

        anything = Requirement()
        try:
            lease = pool.acquire(anything, timeout_s=min(_AT_ONCE_S, wait_s), purpose=purpose)
        except LeaseTimeoutError as error:
            if wait_s <= _AT_ONCE_S or not_held():
                raise
            tell(f"waiting for a device, {wait_s:g} s at most: {one_line(error.reason)}")
            lease = pool.acquire(anything, timeout_s=wait_s - _AT_ONCE_S, purpose=purpose)
        with lease:
            yield lease.device
