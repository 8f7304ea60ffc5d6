"""The gate decides by what it samples; time is a number here."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count

import pytest

from harness.telemetry.gate import ConditionRecord, ThermalGate, wait_until_cool
from tests.clock import ManualClock

Reading = Mapping[str, float]


def run(
    temperatures: Callable[[float], Reading], **gate: float | tuple[str, ...] | None
) -> tuple[ConditionRecord, ManualClock]:
    """The gate over a device whose temperatures are a function of the seconds that passed."""
    clock = ManualClock()
    options: dict[str, object] = {
        "max_temp_c": 40.0, "stable_s": None, "stable_c": 0.5, "max_wait_s": 300.0, **gate,
    }  # fmt: skip
    asked = ThermalGate(**options)  # type: ignore[arg-type]
    return wait_until_cool(lambda: temperatures(clock.time - 1000), asked, clock), clock


def test_a_cool_device_is_not_kept_waiting() -> None:
    record, clock = run(lambda _: {"cpu": 38.0, "skin": 30.0})
    assert (record.name, record.outcome, record.waited_s) == ("thermal_gate", "met", 0.0)
    assert (record.before, record.after) == (38.0, 38.0)
    assert clock.slept == []
    assert "cpu" in record.reason


@pytest.mark.parametrize(("begins_at_c", "told"), [(39.0, 0), (60.0, 1)])
def test_a_wait_is_told_once_and_only_if_there_is_one(begins_at_c: float, told: int) -> None:
    clock, said = ManualClock(), list[str]()
    gate = ThermalGate(40.0, 20.0, 0.5, 300.0)
    wait_until_cool(
        lambda: {"cpu": begins_at_c - (clock.time - 1000) / 2}, gate, clock, said.append
    )
    words = "waiting until it is at or below 40 C or steady for 20 s, 300 s at most: cpu is 60 C"
    assert said == [words] * told


@pytest.mark.parametrize(
    ("temperatures", "options", "outcome", "waited_s", "reason"),
    [
        # It opens as soon as the hottest zone is below.
        (lambda t: {"cpu": 60 - t / 2, "skin": 35.0}, {}, "met", (40, 43), ""),
        (
            lambda t: {"cpu": 60 - t / 100}, {"max_wait_s": 31.0}, "not-met", (31, 31),
            "not cooled: cpu is at 59.69 C above 40 C after 31 s",
        ),
        # A stable temperature will do where it may, once the whole window was seen.
        (
            lambda t: {"cpu": 45 + 20 * 0.9**t, "skin": 36.0 + (t % 4) / 20}, {"stable_s": 20.0},
            "met", (40, 90), "no zone moved more than 0.5 C in 20 s",
        ),
        (
            lambda t: {"cpu": 50.0, "skin": 40.0 + (t % 4) / 20}, {"stable_s": 20.0}, "met",
            (20, 300), "",
        ),
        (
            lambda t: {"cpu": 50.0 + t / 20}, {"stable_s": 20.0, "max_wait_s": 100.0}, "not-met",
            (100, 100), "not stable either",
        ),
        # A stuck sensor neither holds the gate shut nor opens it; one zone alone is not stuck.
        (
            lambda t: {"cpu": max(30.0, 60 - t), "broken": 85.0}, {}, "met", (0, 60),
            "ignored as stuck: broken",
        ),
        (
            lambda t: {"cpu": 85.0, "skin": 36 + (t % 2) / 10}, {"max_wait_s": 60.0}, "not-met",
            (60, 60), "",
        ),
        (
            lambda t: {"cpu": 70.0 - t / 50, "broken": 25.0}, {"max_wait_s": 60.0}, "not-met",
            (60, 60), "",
        ),
        # Sensors that all lie are not waited for long; those that come and go are.
        (lambda _: {}, {}, "unavailable", (0, 10), "no zone gave a plausible temperature"),
        (lambda t: {"cpu": 60 - t} if int(t) % 8 == 0 else {}, {}, "met", (0, 300), ""),
        # Only the zones asked for count.
        (
            lambda _: {"cpu": 70.0, "skin-therm": 33.0}, {"zones": ("skin*", "battery")}, "met",
            (0, 0), "",
        ),
    ],
)  # fmt: skip
def test_the_gate(
    temperatures: Callable[[float], Reading],
    options: dict[str, float | tuple[str, ...] | None],
    outcome: str,
    waited_s: tuple[float, float],
    reason: str,
) -> None:
    record, clock = run(temperatures, **options)
    assert record.outcome == outcome
    assert waited_s[0] <= record.waited_s <= waited_s[1]
    assert record.waited_s == pytest.approx(sum(clock.slept))
    assert reason in record.reason


def test_a_device_without_a_sensor_is_not_waited_for() -> None:
    clock = ManualClock()
    record = wait_until_cool(lambda: None, ThermalGate(40.0, None, 0.5, 60.0), clock)
    assert record.outcome == "unavailable"
    assert record.reason == "the device has no temperature sensor"
    assert clock.slept == []


def test_the_limit_is_kept_however_slowly_the_device_answers() -> None:
    clock = ManualClock()
    calls: Iterator[int] = count()

    def slow() -> Reading:
        next(calls)
        clock.time += 50
        return {"cpu": 80.0}

    gate = ThermalGate(40.0, None, 0.5, 60.0)
    record = wait_until_cool(slow, gate, clock)
    assert record.outcome == "not-met"
    assert next(calls) == 2
