"""The model of heat by itself."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HeatSettingError
from harness.virtual_device.heat.sysfs import SysFiles
from harness.virtual_device.heat.thermal import HeatSettings, HeatState, check_changes

_COOL = HeatState(25, 25)


def test_it_settles_where_power_and_resistance_say() -> None:
    settings = HeatSettings(idle_w=0, core_w=2, resistance_k_per_w=10, ambient_c=20)
    settled = HeatState(20, 20).step(settings, 1e6, busy_cores=1.5)
    assert settled.soc_c == pytest.approx(20 + 3 * 10)
    assert settled.body_c == pytest.approx(20 + 15)


def test_after_one_time_constant_the_rest_is_1_over_e() -> None:
    settings = HeatSettings(
        idle_w=0, load_w=5, resistance_k_per_w=4, capacity_j_per_k=25, ambient_c=25, time_scale=10
    )
    after = _COOL.step(settings, 10, busy_cores=0)
    assert after.soc_c == pytest.approx(25 + 20 * (1 - math.exp(-1)))


@given(st.floats(0, 100), st.floats(0, 8), st.integers(1, 50), st.floats(-20, 150))
def test_many_small_steps_are_one_large_one(
    seconds: float, cores: float, steps: int, start: float
) -> None:
    """So an idle device needs no ticks."""
    settings = HeatSettings()
    once = HeatState(start, start).step(settings, seconds, cores)
    often = HeatState(start, start)
    for _ in range(steps):
        often = often.step(settings, seconds / steps, cores)
    assert often.soc_c == pytest.approx(once.soc_c, abs=1e-6)


@given(st.floats(-40, 300))
def test_clocks_fall_and_severity_rises_with_heat(celsius: float) -> None:
    settings = HeatSettings()
    cooler, hotter = HeatState(celsius, celsius), HeatState(celsius + 5, celsius)
    assert settings.min_speed <= hotter.speed(settings) <= cooler.speed(settings) <= 1
    assert hotter.status(settings) >= cooler.status(settings)
    assert (cooler.speed(settings) < 1) == (celsius > settings.throttle_from_c)


def test_the_battery_follows() -> None:
    unplugged = HeatSettings(charging=False, load_w=9, idle_w=0)
    state = HeatState(25, 25, level=0.5).step(unplugged, 3600, busy_cores=0)
    assert state.level == pytest.approx(0)
    assert state.amperes(unplugged) < 0
    assert state.charge_status(unplugged) == "Discharging"
    full = HeatState(25, 25, level=0.99).step(HeatSettings(), 3600, busy_cores=0)
    assert (full.level, full.charge_status(HeatSettings())) == (1.0, "Full")


@pytest.mark.parametrize(
    "changes",
    [
        {"ambient_c": 500},
        {"ambient_c": math.nan},
        {"temperature_c": math.inf},
        {"battery": 80},
        {"charging": 1.0},
        {"load_w": True},
        {"colour": 3},
        {"throttle_from_c": 95},
    ],
)
def test_settings_that_cannot_be(changes: dict[str, float]) -> None:
    with pytest.raises(HeatSettingError):
        check_changes(changes)


def test_a_governor_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """A shell opens the file, which empties it, before it writes."""
    files = SysFiles(tmp_path / "sys")
    file = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    files.show(HeatSettings(), _COOL, 1.0, 0)
    assert file.read_text() == "schedutil\n"
    file.write_text("")
    files.show(HeatSettings(), _COOL, 1.0, 0)
    assert file.read_text() == ""
    file.write_text("performance\n")
    files.show(HeatSettings(), _COOL, 1.0, 0)
    assert files.governor() == "performance"
    file.write_text("nonsense\n")
    files.show(HeatSettings(), _COOL, 1.0, 0)
    assert file.read_text() == "performance\n"
