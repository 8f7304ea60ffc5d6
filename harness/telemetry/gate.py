"""Thermal gate: waits until a device is cool or stable, by sampling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from harness.clock import Clock

Outcome = Literal["met", "not-met", "unavailable", "restored", "not-restored"]


@dataclass(frozen=True, slots=True)
class ConditionRecord:
    """One condition of a run; `dataclasses.asdict` gives JSON scalars.

    Attributes:
        name: `thermal_gate`, `charge`, `battery_health`, `wake_lock`, `stay_awake`, `screen`,
            `fixed_performance`, `governor`.
        outcome: `unavailable` where the device has no way to bring it about, or to tell.
        reason: in words, where the outcome does not say it all.
        waited_s: how long it took to come about.
        before: the value at first: a temperature in degrees Celsius, a level in percent, a setting.
        after: the value at the end.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    waited_s: float = 0.0
    before: str | float | None = None
    after: str | float | None = None


POLL_S = 2.0
_LOOKS = 3
_FROZEN_S = 20.0
_FROZEN_WHILE_OTHERS_MOVED_C = 3.0


@dataclass(frozen=True, slots=True)
class ThermalGate:
    """Limits below which a device is cool enough.

    Attributes:
        max_temp_c: the hottest zone is at or below it; `None`: only being stable counts.
        stable_s: or no zone moved more than `stable_c` for so long; `None`: only being below
            counts.
        max_wait_s: the limit.
        zones: patterns of the names of the zones that count.
    """

    max_temp_c: float | None
    stable_s: float | None
    stable_c: float
    max_wait_s: float
    zones: tuple[str, ...] = ("*",)


@dataclass
class _History:
    times: list[float] = field(default_factory=list)
    readings: list[Mapping[str, float]] = field(default_factory=list)

    def since(self, moment: float) -> list[Mapping[str, float]] | None:
        """Return the readings from a moment on; `None` when they do not reach back to it."""
        if not self.times or self.times[0] > moment:
            return None
        pairs = zip(self.times, self.readings, strict=True)
        return [reading for at, reading in pairs if at >= moment]

    def is_blind(self) -> bool:
        """Return whether the device has shown no temperature at all, and often enough to say so."""
        return len(self.readings) >= _LOOKS and not any(self.readings)


OnWait = Callable[[str], None]
"""Told once why a device is waited for, and for how long at most."""


def wait_until_cool(
    read: Callable[[], Mapping[str, float] | None],
    gate: ThermalGate,
    clock: Clock,
    on_wait: OnWait | None = None,
) -> ConditionRecord:
    """Sample until the gate opens or its time is over; the record says which, and why.

    Args:
        read: degrees Celsius by zone, implausible ones left out already; `None` from a device
            that has no sensor at all.
        on_wait: told when it does not open at once.
    """
    began = clock.boottime()
    history = _History()
    first: float | None = None
    waited_before = False
    while True:
        moment = clock.boottime()
        temperatures = read()
        if temperatures is None:
            reason = "the device has no temperature sensor"
            return ConditionRecord("thermal_gate", "unavailable", reason)
        reading = {zone: value for zone, value in temperatures.items() if _counts(zone, gate.zones)}
        history.times.append(moment)
        history.readings.append(reading)
        frozen = frozen_zones(history.times, history.readings)
        alive = {zone: value for zone, value in reading.items() if zone not in frozen}
        hottest = max(alive.values(), default=None)
        first = hottest if first is None else first
        waited_s = round(clock.boottime() - began, 3)
        cause = _opens(history, alive, gate)
        if cause is not None:
            reason = cause + _ignored(frozen)
            return ConditionRecord("thermal_gate", "met", reason, waited_s, first, hottest)
        if waited_s >= gate.max_wait_s or history.is_blind():
            reason = _why_not(alive, gate, waited_s) + _ignored(frozen)
            outcome: Outcome = "not-met" if alive else "unavailable"
            return ConditionRecord("thermal_gate", outcome, reason, waited_s, first, hottest)
        if on_wait is not None and alive and not waited_before:
            on_wait(_waiting(alive, gate))
        waited_before = True
        clock.sleep(min(POLL_S, gate.max_wait_s - waited_s))


def _waiting(alive: Mapping[str, float], gate: ThermalGate) -> str:
    zone = max(alive, key=alive.__getitem__)
    wishes = []
    if gate.max_temp_c is not None:
        wishes.append(f"at or below {gate.max_temp_c:g} C")
    if gate.stable_s is not None:
        wishes.append(f"steady for {gate.stable_s:g} s")
    wished = " or ".join(wishes)
    return (
        f"waiting until it is {wished}, {gate.max_wait_s:g} s at most: {zone} is {alive[zone]:g} C"
    )


def frozen_zones(times: list[float], readings: list[Mapping[str, float]]) -> frozenset[str]:
    """Return zones that never changed while another moved by degrees: their sensors are stuck."""
    if not times or times[-1] - times[0] < _FROZEN_S:
        return frozenset()
    everywhere = set.intersection(*(set(reading) for reading in readings))
    spans = {zone: _span([reading[zone] for reading in readings]) for zone in everywhere}
    if max(spans.values(), default=0.0) < _FROZEN_WHILE_OTHERS_MOVED_C:
        return frozenset()
    return frozenset(zone for zone, span in spans.items() if span == 0)


def _opens(history: _History, alive: Mapping[str, float], gate: ThermalGate) -> str | None:
    """Say why the gate opens; `None` while it does not."""
    if not alive:
        return None
    zone = max(alive, key=alive.__getitem__)
    if gate.max_temp_c is not None and alive[zone] <= gate.max_temp_c:
        return f"the hottest zone, {zone}, is at or below {gate.max_temp_c:g} C"
    if gate.stable_s is None:
        return None
    window = history.since(history.times[-1] - gate.stable_s)
    if window is None:
        return None
    spans = [_span([reading[z] for reading in window if z in reading]) for z in alive]
    if max(spans) > gate.stable_c:
        return None
    return f"no zone moved more than {gate.stable_c:g} C in {gate.stable_s:g} s"


def _why_not(alive: Mapping[str, float], gate: ThermalGate, waited: float) -> str:
    if not alive:
        return "no zone gave a plausible temperature"
    zone = max(alive, key=alive.__getitem__)
    limit = "" if gate.max_temp_c is None else f" above {gate.max_temp_c:g} C"
    stable = "" if gate.stable_s is None else ", and not stable either"
    return f"not cooled: {zone} is at {alive[zone]:g} C{limit} after {waited:.0f} s{stable}"


def _ignored(frozen: frozenset[str]) -> str:
    return f"; ignored as stuck: {', '.join(sorted(frozen))}" if frozen else ""


def _counts(zone: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(zone, pattern) for pattern in patterns)


def _span(values: list[float]) -> float:
    return max(values) - min(values) if values else 0.0
