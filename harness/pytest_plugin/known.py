"""Whether a device that is named exists: a test would wait for ever for one that nobody knows."""

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.devices.spec import DeviceSpec


def require_known(specs: "Sequence[DeviceSpec]") -> None:
    """Refuse devices that neither are there now nor ever were in a pool of this user.

    One that is unauthorized, offline, drained, held by others or gone for now is known.

    Raises:
        HarnessError: nobody knows one of them, and why it cannot be found.
    """
    from harness.devices.devices import Devices
    from harness.devices.types import device_types
    from harness.errors import DeviceLostError, DeviceUnauthorizedError

    previews = {spec: device_types()[spec.type].preview(spec) for spec in specs}
    unsure = [spec for spec in specs if not previews[spec].exists]
    if not unsure:
        return
    met = _met(unsure)
    with Devices() as devices:
        for spec in unsure:
            if str(spec) not in met or previews[spec].exists is False:
                with suppress(DeviceLostError, DeviceUnauthorizedError):  # an adb server has it
                    devices.resolve(spec)


def _met(specs: "Sequence[DeviceSpec]") -> set[str]:
    """Those that answered a pool once."""
    from harness.pool.pool import Pool
    from harness.pool.records import Facts
    from harness.pool.states import MemberState

    with Pool.of(()) as pool:  # of no devices: nothing is looked for, and nothing written
        keys = pool.ledger.devices.keys_of([str(spec) for spec in specs])
        rows = pool.ledger.devices.rows(set(keys.values()))
    return {
        spec
        for spec, key in keys.items()
        if key in rows and (rows[key].facts != Facts() or rows[key].state is not MemberState.ABSENT)
    }
