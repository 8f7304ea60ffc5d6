"""Battery charge: the window in which a run may be measured, and health."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.clock import Clock
from harness.telemetry.gate import POLL_S, ConditionRecord, Outcome
from harness.telemetry.readings import BatteryReading

_UNFIT = frozenset(
    {
        "Overheat", "Dead", "Over voltage", "Over current", "Unspecified failure", "Failure",
        "Cold", "Warm", "Hot", "Calibration required",
    }
)  # fmt: skip
"""Health values of the kernel's power supply class that forbid draining the battery."""


@dataclass(frozen=True, slots=True)
class ChargeWindow:
    """The charge that a measured run may begin with.

    Attributes:
        min_percent: a phone that is nearly empty lowers its clocks.
        max_percent: one that is nearly full heats, and some drop off USB.
        charging: whether it must be charging (`True`), must not (`False`), or either (`None`).
        max_wait_s: for the level or the charger to come into the window.
    """

    min_percent: float = 0.0
    max_percent: float = 100.0
    charging: bool | None = None
    max_wait_s: float = 0.0


def wait_for_charge(
    read: Callable[[], BatteryReading], window: ChargeWindow, clock: Clock
) -> Iterator[ConditionRecord]:
    """Yield records of the battery's health, and of its charge once in the window or hopeless.

    A level that is too low without a charger is final: nothing is waited for.
    """
    began = clock.boottime()
    battery = read()
    if not battery.present:
        yield ConditionRecord("charge", "unavailable", "the device tells of no battery")
        return
    yield _health(battery)
    first = battery.level_percent
    while True:
        waited_s = clock.boottime() - began
        wrong, may_change = _judge(battery, window)
        if wrong is None or not may_change or waited_s >= window.max_wait_s:
            outcome: Outcome = "met" if wrong is None else "not-met"
            level = battery.level_percent
            yield ConditionRecord("charge", outcome, wrong or "", round(waited_s, 3), first, level)
            return
        clock.sleep(min(5 * POLL_S, window.max_wait_s - waited_s))
        battery = read()


def _health(battery: BatteryReading) -> ConditionRecord:
    health = battery.health
    if health is None or health == "Unknown":
        reason = "the device does not tell its battery's health"
        return ConditionRecord("battery_health", "unavailable", reason, after=health)
    if health in _UNFIT:
        reason = f"the device says of its battery: {health}"
        return ConditionRecord("battery_health", "not-met", reason, after=health)
    return ConditionRecord("battery_health", "met", after=health)


def _judge(battery: BatteryReading, window: ChargeWindow) -> tuple[str | None, bool]:
    """Return the problem with the charge, and whether waiting may solve it."""
    level = battery.level_percent
    if level is None:
        return "the device tells no level any more", True
    if level < window.min_percent:
        # `None` is a device that does not tell; it may be charging.
        reason = f"the level is {level:g} %, below {window.min_percent:g} %"
        idle = battery.charging is False
        return (f"{reason}, and it is not charging" if idle else reason), not idle
    if level > window.max_percent:
        reason = f"the level is {level:g} %, above {window.max_percent:g} %"
        busy = battery.charging is True
        return (f"{reason}, and it is charging: unplug it" if busy else reason), not busy
    if window.charging is not None and battery.charging is not window.charging:
        target = "charging" if window.charging else "not charging"
        state = {True: "charging", False: "not charging", None: "not telling"}[battery.charging]
        return f"it is {state}, and should be {target}", True
    return None, False
