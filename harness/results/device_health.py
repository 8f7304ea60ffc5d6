"""Health of a pool's devices, as reports show it.

Reports know no pool. A package that knows one offers a function under the entry point group
`qnnfarm.device_health`, which returns these records.
"""

from dataclasses import dataclass
from datetime import datetime

DOOR = "device_health"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Event in the life of a device.

    Attributes:
        what: kind of event: `granted`, `failed`, `distrusted`.
    """

    at: datetime
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """A device of a pool.

    Attributes:
        serials: by which results may name the device.
        state: `ready`, `leased`, `quarantined`, ...
        reason: why it is in this state, in words.
        failures: those that count against it, newest last.
        events: oldest first.
    """

    name: str
    serials: tuple[str, ...]
    state: str
    reason: str
    since: datetime
    failures: tuple[str, ...] = ()
    events: tuple[DeviceEvent, ...] = ()
