from collections.abc import Callable

import pytest

from harness.telemetry.charge import ChargeWindow, wait_for_charge
from harness.telemetry.gate import ConditionRecord
from harness.telemetry.readings import BatteryReading, battery_of_service
from tests.clock import ManualClock


def run(
    battery: Callable[[float], BatteryReading], window: ChargeWindow
) -> tuple[dict[str, ConditionRecord], ManualClock]:
    clock = ManualClock()
    records = wait_for_charge(lambda: battery(clock.time - 1000), window, clock)
    return {record.name: record for record in records}, clock


def test_in_the_window_nothing_is_waited_for() -> None:
    found, clock = run(lambda _: BatteryReading(80, False, "Good"), ChargeWindow(20, 90))
    assert {name: record.outcome for name, record in found.items()} == {
        "battery_health": "met",
        "charge": "met",
    }
    assert clock.slept == []


def test_a_level_that_rises_is_waited_for() -> None:
    window = ChargeWindow(30, 90, max_wait_s=1000)
    found, _ = run(lambda t: BatteryReading(20 + t / 10, True, "Good"), window)
    assert found["charge"].outcome == "met"
    assert found["charge"].waited_s == pytest.approx(100)
    assert (found["charge"].before, found["charge"].after) == (20, 30)


@pytest.mark.parametrize(
    ("battery", "words"),
    [
        (BatteryReading(10, False, "Good"), "below 30 %, and it is not charging"),
        (BatteryReading(99, True, "Good"), "above 90 %, and it is charging: unplug it"),
    ],
)
def test_an_impossible_charge_fails_at_once(battery: BatteryReading, words: str) -> None:
    found, clock = run(lambda _: battery, ChargeWindow(30, 90, max_wait_s=1000))
    assert found["charge"].outcome == "not-met"
    assert words in found["charge"].reason
    assert clock.slept == []


def test_the_charger_is_waited_for_until_the_limit() -> None:
    window = ChargeWindow(0, 100, charging=False, max_wait_s=45)
    found, clock = run(lambda _: BatteryReading(50, True, "Good"), window)
    assert found["charge"].reason == "it is charging, and should be not charging"
    assert sum(clock.slept) == pytest.approx(45)
    found, _ = run(lambda t: BatteryReading(50, t < 20, "Good"), window)
    assert found["charge"].outcome == "met"


@pytest.mark.parametrize(
    ("health", "outcome"),
    [("Good", "met"), ("Dead", "not-met"), ("Overheat", "not-met"), ("Unknown", "unavailable"),
     (None, "unavailable")],
)  # fmt: skip
def test_health(health: str | None, outcome: str) -> None:
    found, _ = run(lambda _: BatteryReading(50, False, health), ChargeWindow())
    assert found["battery_health"].outcome == outcome


def test_a_board_has_no_battery() -> None:
    found, _ = run(lambda _: BatteryReading(), ChargeWindow(20, 90))
    assert found["charge"].outcome == "unavailable"


def test_the_service_is_read_where_the_kernel_denies() -> None:
    output = (
        "Current Battery Service state:\n  AC powered: false\n  USB powered: true\n  status: 2\n"
        "  health: 4\n  present: true\n  level: 64\n  scale: 100\n  temperature: 312\n"
    )
    assert battery_of_service(output) == BatteryReading(64.0, True, "Dead", 31.2)
    assert battery_of_service("  level: 640\n  health: 9\n") == BatteryReading()
    assert not battery_of_service("Can't find service: battery").present
