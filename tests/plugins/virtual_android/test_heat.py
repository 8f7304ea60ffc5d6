"""The heat model, and what a device's shell sees of it."""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import VirtualDeviceError
from plugins.virtual_android import manager
from plugins.virtual_android.heat.sysfs import SysFiles
from plugins.virtual_android.heat.thermal import HeatSettings, HeatState, check_changes
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb, Worker
from tests.waiting import wait_for

_COOL = HeatState(25, 25)


def test_it_settles_at_power_times_resistance() -> None:
    settings = HeatSettings(idle_w=0, core_w=2, resistance_k_per_w=10, ambient_c=20)
    settled = HeatState(20, 20).step(settings, 1e6, busy_cores=1.5)
    assert settled.soc_c == pytest.approx(20 + 3 * 10)
    assert settled.body_c == pytest.approx(20 + 15)


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
    [{"ambient_c": 500}, {"ambient_c": math.nan}, {"temperature_c": math.inf}, {"battery": 80},
     {"charging": 1.0}, {"load_w": True}, {"colour": 3}, {"throttle_from_c": 95}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(VirtualDeviceError):
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


_SYS = "cd $QNNFARM_SYS_ROOT &&"
_CPU0 = "devices/system/cpu/cpu0/cpufreq"


@pytest.fixture(scope="module")
def warm(start_device: Callable[..., VirtualDevice]) -> VirtualDevice:
    return start_device("warm")


@pytest.fixture
def shell(warm: VirtualDevice, adb: Adb) -> Iterator[Callable[[str], str]]:
    def run(command: str) -> str:
        done = adb("-s", warm.serial, "shell", command)
        return (done.stdout + done.stderr).decode()

    yield run
    manager.control(warm.name).heat_off()


Shell = Callable[[str], str]


def test_without_the_model_nothing_is_made_up(warm: VirtualDevice, shell: Shell) -> None:
    assert manager.control(warm.name).heat() is None
    assert shell("ls $QNNFARM_SYS_ROOT/class 2>&1 >/dev/null") != ""
    assert "present: false" in shell("dumpsys battery")
    assert "Can't find service" in shell("dumpsys thermalservice")
    assert "not supported" in shell("cmd power set-fixed-performance-mode-enabled true")


def test_files_show_the_model(warm: VirtualDevice, shell: Shell) -> None:
    manager.control(warm.name).heat(
        ambient_c=30, temperature_c=48.25, battery=0.5, charging=False,
        capacity_j_per_k=1e5,
    )  # fmt: skip
    shown = shell(
        f"{_SYS} cat class/thermal/thermal_zone*/type class/thermal/thermal_zone*/temp"
        f" {_CPU0}/cpuinfo_max_freq {_CPU0}/scaling_max_freq {_CPU0}/scaling_available_governors"
        " class/devfreq/ddr/max_freq"
    ).split()
    assert shown[:4] == ["cpuss-0", "nspss-0", "skin-therm", "battery"]
    assert all(47_000 < int(text) <= 48_250 for text in shown[4:8])
    assert shown[8:] == [
        "3000000", "3000000", "schedutil", "performance", "powersave", "4000000000",
    ]  # fmt: skip
    battery = shell(f"{_SYS} cd class/power_supply/battery && cat status capacity health temp")
    status, capacity, health, temperature = battery.split()
    assert (status, capacity, health) == ("Discharging", "50", "Good")
    assert 470 < int(temperature) <= 483
    assert int(shell(f"{_SYS} cat class/power_supply/battery/current_now")) < 0
    dumped = shell("dumpsys battery")
    assert "  level: 50\r\n" in dumped.replace("\n", "\r\n")
    assert "  status: 3" in dumped
    assert "USB powered: false" in dumped


def test_work_heats_it_and_rest_cools_it(warm: VirtualDevice, shell: Shell) -> None:
    # With such a resistance it keeps the heat, however late it is looked at.
    manager.control(warm.name).heat(
        ambient_c=25, temperature_c=25, time_scale=100, idle_w=0, throttle_to_c=200,
        resistance_k_per_w=1000, capacity_j_per_k=5,
    )  # fmt: skip
    zone = f"{_SYS} cat class/thermal/thermal_zone0/temp"
    cool = int(shell(zone))
    shell("i=0; while [ $i -lt 60000 ]; do i=$((i + 1)); done")
    hot = int(shell(zone))
    assert hot > cool + 500
    manager.control(warm.name).heat(resistance_k_per_w=9)
    wait_for(lambda: int(shell(zone)) < hot - (hot - cool) // 4)


def test_heat_slows_its_processes_and_is_seen(warm: VirtualDevice, shell: Shell) -> None:
    worker = Worker(shell)
    assert not worker.is_stopped()
    state = manager.control(warm.name).heat(
        temperature_c=120, capacity_j_per_k=10_000, min_speed=0.1
    )
    assert state is not None
    assert (state.speed, state.status) == (0.1, 4)
    frequencies = shell(f"{_SYS} cat {_CPU0}/scaling_max_freq {_CPU0}/cpuinfo_max_freq")
    assert frequencies.split() == ["300000", "3000000"]
    wait_for(worker.is_stopped)
    dumped = shell("dumpsys thermalservice")
    assert "Thermal Status: 4" in dumped
    manager.control(warm.name).heat(temperature_c=30)
    wait_for(lambda: not worker.is_stopped())
    worker.end()
    assert "\tTemperature{mValue=11" in dumped or "\tTemperature{mValue=12" in dumped


def test_governors_and_fixed_performance_act(warm: VirtualDevice, shell: Shell) -> None:
    manager.control(warm.name).heat(temperature_c=25)
    clock = f"{_SYS} cat {_CPU0}/scaling_cur_freq"
    shell(f"{_SYS} echo performance >devices/system/cpu/cpu3/cpufreq/scaling_governor")
    wait_for(lambda: shell(clock) == "3000000\n")
    assert shell(f"{_SYS} cat {_CPU0}/scaling_governor") == "performance\n"
    shell(f"{_SYS} echo nonsense >{_CPU0}/scaling_governor")
    wait_for(lambda: shell(f"{_SYS} cat {_CPU0}/scaling_governor") == "performance\n")
    shell("cmd power set-fixed-performance-mode-enabled true")
    wait_for(lambda: shell(clock) == "2100000\n")
    shell("cmd power set-fixed-performance-mode-enabled false")
    wait_for(lambda: shell(clock) == "3000000\n")


def test_commands_about_power_do_what_they_say_or_refuse(shell: Shell) -> None:
    assert shell("settings get global stay_on_while_plugged_in") == "null\n"
    assert shell("svc power stayon true && dumpsys power").count("Setting=15") == 1
    assert shell("settings put system k 'a  b' && settings get system k") == "a  b\n"
    assert "k=a  b\n" in shell("settings list system")
    assert shell("settings delete system k; settings get system k") == "Deleted 1 rows\nnull\n"
    assert "mWakefulness=Asleep" in shell("input keyevent KEYCODE_SLEEP; dumpsys power")
    assert "state=ON" in shell("input keyevent 224; dumpsys power")
    shell("settings delete global stay_on_while_plugged_in")
    for hostile in ("../../x", "a/b", ".h"):
        assert shell(f"settings put system {hostile} z 2>/dev/null; echo $?") == "1\n"


def test_an_idle_device_computes_nothing(warm: VirtualDevice, shell: Shell) -> None:
    manager.control(warm.name).heat(temperature_c=60)
    shell("true")
    file = warm.root / "sys/class/thermal/thermal_zone0/temp"
    wait_for(lambda: _same_twice(file.read_text))
    before = float(file.read_text())
    wait_for(
        lambda: manager.control(warm.name).heat() is not None and float(file.read_text()) < before
    )


def test_two_readings_in_a_row_agree(warm: VirtualDevice, shell: Shell) -> None:
    manager.control(warm.name).heat(idle_w=0, core_w=1)
    spin = "(while :; do :; done) </dev/null >/dev/null 2>&1 & echo $!"
    pids = shell(f"{spin}; {spin}").split()
    most = 0.0
    for _ in range(60):
        reading = manager.control(warm.name).heat()
        assert reading is not None
        most = max(most, reading.power_w)
    shell(f"kill {' '.join(pids)}")
    assert 0 < most < 1.5 * (os.cpu_count() or 1)


def _same_twice(read: Callable[[], str]) -> bool:
    first = read()
    time.sleep(0.4)
    return first == read()
