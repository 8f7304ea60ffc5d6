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


def test_it_opens_as_soon_as_the_hottest_zone_is_below() -> None:
    record, _ = run(lambda t: {"cpu": 60 - t / 2, "skin": 35.0})
    assert record.outcome == "met"
    assert 40 <= record.waited_s <= 43
    assert record.before == 60.0
    assert record.after == pytest.approx(39.5, abs=0.6)


def test_it_says_when_it_did_not_cool_in_time() -> None:
    record, clock = run(lambda t: {"cpu": 60 - t / 100}, max_wait_s=31.0)
    assert record.outcome == "not-met"
    assert record.waited_s == pytest.approx(31)
    assert sum(clock.slept) == pytest.approx(31)
    assert "not cooled: cpu is at 59.69 C above 40 C after 31 s" in record.reason


def test_a_stable_temperature_will_do_when_it_may() -> None:
    def cooling(t: float) -> Reading:
        return {"cpu": 45 + 20 * 0.9**t, "skin": 36.0 + (t % 4) / 20}

    record, _ = run(cooling, stable_s=20.0)
    assert record.outcome == "met"
    assert 40 < record.waited_s < 90
    assert "no zone moved more than 0.5 C in 20 s" in record.reason


def test_stable_is_not_said_before_the_whole_window_was_seen() -> None:
    record, _ = run(lambda t: {"cpu": 50.0, "skin": 40.0 + (t % 4) / 20}, stable_s=20.0)
    assert record.waited_s >= 20


def test_a_moving_zone_is_not_stable() -> None:
    record, _ = run(lambda t: {"cpu": 50.0 + t / 20}, stable_s=20.0, max_wait_s=100.0)
    assert record.outcome == "not-met"
    assert "not stable either" in record.reason


def test_a_stuck_hot_sensor_does_not_hold_the_gate_shut() -> None:
    record, _ = run(lambda t: {"cpu": max(30.0, 60 - t), "broken": 85.0})
    assert record.outcome == "met"
    assert "ignored as stuck: broken" in record.reason
    assert record.waited_s < 60


def test_a_constant_temperature_alone_is_not_taken_for_a_stuck_sensor() -> None:
    record, _ = run(lambda t: {"cpu": 85.0, "skin": 36 + (t % 2) / 10}, max_wait_s=60.0)
    assert record.outcome == "not-met"


def test_a_stuck_cool_sensor_does_not_open_it() -> None:
    record, _ = run(lambda t: {"cpu": 70.0 - t / 50, "broken": 25.0}, max_wait_s=60.0)
    assert record.outcome == "not-met"


def test_a_device_without_a_sensor_is_not_waited_for() -> None:
    clock = ManualClock()
    record = wait_until_cool(lambda: None, ThermalGate(40.0, None, 0.5, 60.0), clock)
    assert (record.outcome, record.reason) == (
        "unavailable",
        "the device has no temperature sensor",
    )
    assert clock.slept == []


def test_sensors_that_all_lie_are_not_waited_for_long() -> None:
    record, clock = run(lambda _: {})
    assert record.outcome == "unavailable"
    assert sum(clock.slept) < 10
    assert "no temperature that can be believed" in record.reason


def test_sensors_that_come_and_go_are_waited_for() -> None:
    record, _ = run(lambda t: {"cpu": 60 - t} if int(t) % 8 == 0 else {})
    assert record.outcome == "met"


def test_only_the_zones_asked_for_count() -> None:
    record, _ = run(lambda _: {"cpu": 70.0, "skin-therm": 33.0}, zones=("skin*", "battery"))
    assert record.outcome == "met"
    assert record.after == 33.0


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
