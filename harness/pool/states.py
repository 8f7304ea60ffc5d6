"""The state machine of a device: every way from one state to another stands in one table."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from harness.pool.base import MemberState as State


class Event(StrEnum):
    """What happens to a device."""

    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    """Whoever held or worked on it is gone."""
    FAILED = "failed"
    """It has to be recovered."""
    RECOVER = "recovery"
    """It is to be recovered: a person asks for it, or it is time to look for it again."""
    RECOVERED = "recovered"
    GAVE_UP = "gave up"
    """No step of recovery helped."""
    LOST = "lost"
    """It was looked for, and is not there."""
    FOUND = "found"
    """It answered."""
    DISTRUSTED = "distrusted"
    """Its evidence is over the limit."""
    TRIED = "tried"
    """A probation run begins."""
    PASSED = "passed"
    NOT_PASSED = "not passed"
    DRAIN = "drain"
    UNDRAIN = "undrain"


_TABLE: dict[State, dict[Event, State]] = {
    State.READY: {
        Event.GRANTED: State.LEASED,
        Event.FAILED: State.RECOVERING,
        Event.RECOVER: State.RECOVERING,
        Event.LOST: State.ABSENT,
        Event.DISTRUSTED: State.QUARANTINED,
        Event.DRAIN: State.DRAINING,
    },
    State.LEASED: {
        Event.RELEASED: State.READY,
        Event.EXPIRED: State.READY,
        Event.FAILED: State.RECOVERING,
        Event.DRAIN: State.DRAINING,
        # A repair during which it was drained and undrained: leased by whoever does it.
        Event.RECOVERED: State.READY,
        Event.GAVE_UP: State.ABSENT,
        Event.PASSED: State.READY,
        Event.NOT_PASSED: State.QUARANTINED,
    },
    State.DRAINING: {
        Event.UNDRAIN: State.READY,
        # A person's wish outlasts what happens meanwhile.
        Event.RELEASED: State.DRAINING,
        Event.EXPIRED: State.DRAINING,
        Event.FAILED: State.DRAINING,
    },
    State.RECOVERING: {
        Event.RECOVERED: State.READY,
        Event.GAVE_UP: State.ABSENT,
        Event.EXPIRED: State.RECOVERING,
        Event.FAILED: State.RECOVERING,
        Event.RECOVER: State.RECOVERING,
        Event.DRAIN: State.DRAINING,
    },
    State.ABSENT: {
        Event.FOUND: State.READY,
        Event.FAILED: State.RECOVERING,
        Event.RECOVER: State.RECOVERING,
        Event.DRAIN: State.DRAINING,
    },
    State.QUARANTINED: {
        Event.TRIED: State.PROBATION,
        Event.DRAIN: State.DRAINING,
    },
    State.PROBATION: {
        Event.PASSED: State.READY,
        Event.NOT_PASSED: State.QUARANTINED,
        Event.EXPIRED: State.QUARANTINED,
        Event.DRAIN: State.DRAINING,
    },
}

TRANSITIONS: Mapping[State, Mapping[Event, State]] = MappingProxyType(
    {state: MappingProxyType(ways) for state, ways in _TABLE.items()}
)


def after(state: State, event: Event) -> State | None:
    """The state that follows; `None` where the event cannot happen or changes nothing."""
    return TRANSITIONS[state].get(event)
