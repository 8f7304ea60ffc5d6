"""State machine of a device: one table has all transitions."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class MemberState(StrEnum):
    """State of a device in a pool; each has a reason, and an exit in the table below."""

    READY = "ready"
    LEASED = "leased"
    DRAINING = "draining"
    """A person allows no new leases; ends with `undrain`."""
    RECOVERING = "recovering"
    """It failed; the steps of recovery are being tried."""
    QUARANTINED = "quarantined"
    """Its failures say that its results cannot be trusted; ends with a probation run."""
    PROBATION = "probation"
    """A run decides whether it is ready again."""
    ABSENT = "absent"
    """It is not there; it is looked for again."""


class Event(StrEnum):
    """Event of a device that may change its state."""

    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    """The process that held or repaired it is gone."""
    FAILED = "failed"
    """It has to be recovered."""
    RECOVER = "recovery"
    """A recovery begins: a person asks for it, or the device is looked for again."""
    RECOVERED = "recovered"
    GAVE_UP = "gave up"
    """No step of recovery helped."""
    LOST = "lost"
    """It was looked for, and is not there."""
    FOUND = "found"
    """It answered."""
    DISTRUSTED = "distrusted"
    """Its failures are over the limit."""
    TRIED = "tried"
    """A probation run begins."""
    PASSED = "passed"
    NOT_PASSED = "not passed"
    DRAIN = "drain"
    UNDRAIN = "undrain"


_TABLE: dict[MemberState, dict[Event, MemberState]] = {
    MemberState.READY: {
        Event.GRANTED: MemberState.LEASED,
        Event.FAILED: MemberState.RECOVERING,
        Event.RECOVER: MemberState.RECOVERING,
        Event.LOST: MemberState.ABSENT,
        Event.DISTRUSTED: MemberState.QUARANTINED,
        Event.DRAIN: MemberState.DRAINING,
    },
    MemberState.LEASED: {
        Event.RELEASED: MemberState.READY,
        Event.EXPIRED: MemberState.READY,
        Event.FAILED: MemberState.RECOVERING,
        Event.DRAIN: MemberState.DRAINING,
        # A repair during which it was drained and undrained: leased by the process that repairs it.
        Event.RECOVERED: MemberState.READY,
        Event.GAVE_UP: MemberState.ABSENT,
        Event.PASSED: MemberState.READY,
        Event.NOT_PASSED: MemberState.QUARANTINED,
    },
    MemberState.DRAINING: {
        Event.UNDRAIN: MemberState.READY,
        # A drain outlasts what happens meanwhile.
        Event.RELEASED: MemberState.DRAINING,
        Event.EXPIRED: MemberState.DRAINING,
        Event.FAILED: MemberState.DRAINING,
    },
    MemberState.RECOVERING: {
        Event.RECOVERED: MemberState.READY,
        Event.GAVE_UP: MemberState.ABSENT,
        Event.EXPIRED: MemberState.RECOVERING,
        Event.FAILED: MemberState.RECOVERING,
        Event.RECOVER: MemberState.RECOVERING,
        Event.DRAIN: MemberState.DRAINING,
    },
    MemberState.ABSENT: {
        Event.FOUND: MemberState.READY,
        Event.FAILED: MemberState.RECOVERING,
        Event.RECOVER: MemberState.RECOVERING,
        Event.DRAIN: MemberState.DRAINING,
    },
    MemberState.QUARANTINED: {
        Event.TRIED: MemberState.PROBATION,
        Event.DRAIN: MemberState.DRAINING,
    },
    MemberState.PROBATION: {
        Event.PASSED: MemberState.READY,
        Event.NOT_PASSED: MemberState.QUARANTINED,
        Event.EXPIRED: MemberState.QUARANTINED,
        Event.DRAIN: MemberState.DRAINING,
    },
}

TRANSITIONS: Mapping[MemberState, Mapping[Event, MemberState]] = MappingProxyType(
    {state: MappingProxyType(ways) for state, ways in _TABLE.items()}
)


def after(state: MemberState, event: Event) -> MemberState | None:
    """Return the state that follows; `None` where the event cannot happen or changes nothing."""
    return TRANSITIONS[state].get(event)
