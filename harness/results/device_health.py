"""Health of a pool's devices, as reports show it.

Reports know no pool. A package that knows one offers a function under the entry point group
`qnnfarm.device_health`, which returns these records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

DOOR = "device_health"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Event in the life of a device.

    Attributes:
        what: kind of event: `granted`, `failed`, `distrusted`; `day` or `month` for a total.
        counts: number of events by kind, in a total.
    """

    at: datetime
    what: str
    text: str
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def tally(self) -> Mapping[str, int]:
        """Number of events by kind, of an event or of a total."""
        return self.counts or {self.what: 1}


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
