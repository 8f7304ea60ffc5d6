"""Preparing a device and putting it back: on this machine, and on a virtual device's Android."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.device import Device
from harness.errors import ConditionsNotMetError, HarnessError, WrongUseError
from harness.telemetry.charge import ChargeWindow
from harness.telemetry.conditions import Conditions, prepared, run_prepare
from harness.telemetry.gate import ConditionRecord
from harness.telemetry.readings import Sensors
from plugins.virtual_android import manager
from tests.clock import ManualClock
from tests.harness.telemetry.conftest import Here, scripts_on

MakeDevice = Callable[..., tuple[manager.VirtualDevice, Device]]


def by_name(records: Sequence[ConditionRecord]) -> Mapping[str, ConditionRecord]:
    return {record.name: record for record in records}


class Cooling(ManualClock):
    """A clock with which a zone cools: a degree a second, from 60."""

    def __init__(self, sysfs: Path) -> None:
        super().__init__()
        for folder in (sysfs / "class/thermal").iterdir():
            (folder / "temp").write_text("30000\n")
        self._zone = sysfs / "class/thermal/thermal_zone4/temp"
        self._zone.write_text("60000\n")

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._zone.write_text(f"{60000 - 1000 * round(self.time - 1000)}\n")


def test_the_gate_waits_for_the_sensors_of_the_device(here: Here) -> None:
    clock = Cooling(here.sysfs)
    conditions = Conditions(max_temp_c=42.0, wake_lock=False)
    with prepared(here.device, here.scripts_dir, conditions, clock=clock) as records:
        found = by_name(records)
    assert found["thermal_gate"].outcome == "met"
    assert found["thermal_gate"].before == 60.0
    assert found["thermal_gate"].after == 42.0
    assert found["thermal_gate"].waited_s == pytest.approx(18, abs=2)


def refuse(here: Here, conditions: Conditions, match: str) -> ConditionsNotMetError:
    """See that conditions do not come about, and return the error."""
    with (
        pytest.raises(ConditionsNotMetError, match=match) as caught,
        prepared(here.device, here.scripts_dir, conditions, clock=ManualClock()),
    ):
        pytest.fail("the block must not run")
    return caught.value


def test_a_device_that_stays_hot_fails_or_is_recorded(here: Here) -> None:
    conditions = Conditions(max_temp_c=31.0, max_wait_s=20.0, wake_lock=False)
    assert refuse(here, conditions, "thermal_gate: not cooled").waited_s == pytest.approx(20)
    lenient = dataclasses.replace(conditions, policy="continue")
    with prepared(here.device, here.scripts_dir, lenient, clock=ManualClock()) as records:
        assert by_name(records)["thermal_gate"].outcome == "not-met"


def test_heat_that_cannot_be_seen_is_no_pass(here: Here) -> None:
    shutil.rmtree(here.sysfs / "class")
    conditions = Conditions(max_temp_c=40.0, wake_lock=False)
    refuse(here, conditions, "the device has no temperature sensor")


def test_sensors_that_lie_are_not_listened_to(here: Here) -> None:
    for number, lie in enumerate(("-40000", "0", "127000", "garbage", "")):
        (here.sysfs / f"class/thermal/thermal_zone{number}/temp").write_text(lie + "\n")
    found = Sensors(here.device, here.scripts_dir).read().temperatures
    assert not {"cpu-0-0", "cpu-1-0", "gpuss-0", "nsphvx-0"} & set(found)
    assert found["xo-therm"] == 37.0


def test_sensors_that_all_lie_are_no_pass(here: Here) -> None:
    for file in here.sysfs.glob("class/thermal/*/temp"):
        file.write_text("-40000\n")
    (here.sysfs / "class/power_supply/battery/temp").write_text("9990\n")
    conditions = Conditions(max_temp_c=40.0, wake_lock=False)
    refuse(here, conditions, "no zone gave a plausible temperature")


def test_the_charge_window_and_the_battery_s_health(here: Here) -> None:
    battery = here.sysfs / "class/power_supply/battery"
    conditions = Conditions(charge=ChargeWindow(20, 90, charging=False), wake_lock=False)
    with prepared(here.device, here.scripts_dir, conditions, clock=ManualClock()) as records:
        found = by_name(records)
    assert (found["charge"].outcome, found["charge"].after) == ("met", 81.0)
    assert (found["battery_health"].outcome, found["battery_health"].after) == ("met", "Good")
    (battery / "health").write_text("Dead\n")
    refuse(here, conditions, r"battery_health: .* Dead")


def governors(sysfs: Path) -> set[str]:
    files = sysfs.glob("devices/system/cpu/cpu*/cpufreq/scaling_governor")
    return {file.read_text().strip() for file in files}


def test_governors_are_set_and_restored_also_after_an_error(here: Here) -> None:
    conditions = Conditions(governor="performance", wake_lock=False)
    records: list[ConditionRecord] = []

    def fail() -> None:
        with prepared(here.device, here.scripts_dir, conditions) as done:
            records.extend(done)
            assert governors(here.sysfs) == {"performance"}
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError, match="the run failed"):
        fail()
    record = by_name(records)["governor"]
    assert (record.outcome, record.before, record.after) == ("met", "walt", "performance")
    assert governors(here.sysfs) == {"walt"}
    assert not Path(here.device.work_root, "prepared").exists()


def test_changes_of_a_dead_session_are_undone_by_the_next(here: Here) -> None:
    run_prepare(here.device, here.scripts_dir, "apply", "governor=performance")
    assert governors(here.sysfs) == {"performance"}  # and nobody restores
    with prepared(here.device, here.scripts_dir, Conditions(wake_lock=False)) as records:
        assert governors(here.sysfs) == {"walt"}
    assert {(record.name, record.outcome) for record in records} >= {("governor.0", "restored")}


def test_impossible_changes_are_recorded(here: Here) -> None:
    shutil.rmtree(here.sysfs / "devices")
    (here.sysfs / "power/wake_lock").unlink()
    conditions = Conditions(governor="performance", screen_off=True, fixed_performance=True)
    with prepared(here.device, here.scripts_dir, conditions) as records:
        found = by_name(records)
    # This machine has neither Android's commands nor, now, anything to write to.
    assert {name: record.outcome for name, record in found.items()} == dict.fromkeys(
        ("wake_lock", "stay_awake", "fixed_performance", "governor", "screen"), "unavailable"
    )
    assert all(record.reason for record in found.values())


def test_a_lock_that_the_kernel_keeps_is_told(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    # Plain files: what is written to wake_unlock takes nothing out of wake_lock.
    with prepared(here.device, here.scripts_dir, Conditions()) as records:
        assert by_name(records)["wake_lock"].outcome == "met"
        assert (here.sysfs / "power/wake_lock").read_text() == "qnnfarm\n"
    assert (here.sysfs / "power/wake_unlock").read_text() == "qnnfarm\n"
    assert "wake_lock: " in caplog.text


def test_a_governor_that_does_not_take_is_recorded(here: Here) -> None:
    stubborn = here.sysfs / "devices/system/cpu/cpu3/cpufreq/scaling_governor"
    stubborn.unlink()
    stubborn.symlink_to("/dev/null")
    with prepared(
        here.device, here.scripts_dir, Conditions(governor="performance", wake_lock=False)
    ) as records:
        record = by_name(records)["governor"]
    assert record.outcome == "not-met"
    assert "7 of 8 CPUs" in record.reason
    assert governors(here.sysfs) >= {"walt"}


def test_records_are_json_scalars(here: Here) -> None:
    conditions = Conditions(max_temp_c=90.0, governor="performance", charge=ChargeWindow())
    with prepared(here.device, here.scripts_dir, conditions) as records:
        rows = [dataclasses.asdict(record) for record in records]
    assert len(rows) >= 4
    assert json.loads(json.dumps(rows)) == rows
    values = [value for row in rows for value in row.values()]
    assert all(value is None or isinstance(value, str | int | float) for value in values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_temp_c": float("nan")},
        {"max_temp_c": 500},
        {"stable_s": 0},
        {"max_wait_s": -1},
        {"governor": "x; reboot"},
        {"zones": ()},
        {"policy": "hope"},
        {"charge": ChargeWindow(90, 20)},
        {"charge": ChargeWindow(-1, 20)},
    ],
)
def test_invalid_conditions_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(WrongUseError, match=r"the condition .* cannot be used"):
        Conditions(**wrong)  # type: ignore[arg-type]


@pytest.fixture
def phone(make_virtual_device: MakeDevice) -> tuple[str, Device, str]:
    """A virtual device with a heat model, and so with sensors, and our scripts on it."""
    virtual, device = make_virtual_device()
    manager.control(virtual.name).heat(temperature_c=35)
    return virtual.name, device, scripts_on(device)


def state_of(device: Device) -> str:
    return device.shell(
        "settings get global stay_on_while_plugged_in; dumpsys power | grep -m1 mWakefulness=;"
        "cat $QNNFARM_SYS_ROOT/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    ).stdout


def test_android_is_prepared_and_put_back(
    phone: tuple[str, Device, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, device, scripts_dir = phone
    before = state_of(device)
    conditions = Conditions(
        max_temp_c=45.0, charge=ChargeWindow(20, 90), screen_off=True, fixed_performance=True,
        governor="performance",
    )  # fmt: skip
    with prepared(device, scripts_dir, conditions) as records:
        found = by_name(records)
        during = state_of(device)
    assert {name: record.outcome for name, record in found.items()} == {
        "wake_lock": "unavailable", "stay_awake": "met", "fixed_performance": "met",
        "governor": "met", "screen": "met", "battery_health": "met", "charge": "met",
        "thermal_gate": "met",
    }  # fmt: skip
    assert during.split() == ["7", "mWakefulness=Asleep", "performance"]
    assert state_of(device) == before
    assert caplog.text == ""


@pytest.mark.variant
def test_a_hot_phone_is_waited_for_until_it_has_cooled(phone: tuple[str, Device, str]) -> None:
    name, device, scripts_dir = phone
    manager.control(name).heat(temperature_c=60, capacity_j_per_k=2.0, time_scale=20, idle_w=0.1)
    with prepared(device, scripts_dir, Conditions(max_temp_c=40.0, max_wait_s=60.0)) as records:
        record = by_name(records)["thermal_gate"]
    assert record.outcome == "met"
    assert isinstance(record.before, float)
    assert record.before > 45
    assert record.waited_s > 0


def test_a_device_that_goes_away_is_restored_by_the_next_preparation(
    adb_server: AdbServer, phone: tuple[str, Device, str], caplog: pytest.LogCaptureFixture
) -> None:
    name, device, scripts_dir = phone

    def lose() -> None:
        with prepared(device, scripts_dir, Conditions(screen_off=True)):
            manager.stop(name)
            device.shell("true")

    with pytest.raises(HarnessError):
        lose()
    assert "preparation: left for the next preparation to undo" in caplog.text
    manager.start(name, "SM8750")
    adb_server.connect(device.serial)
    with prepared(device, scripts_dir, Conditions(wake_lock=False)) as records:
        undone = by_name(records)
    assert undone["stay_awake"].outcome == "restored"
    assert undone["screen"].outcome == "restored"
