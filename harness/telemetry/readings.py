"""One look at a device's sensors and battery, by `telemetry.sh once` and Android's own service."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.devices.device import Device
from harness.devices.properties import parse_battery, parse_dumpsys
from harness.telemetry.protocol import (
    COLDEST_C,
    HOTTEST_C,
    TelemetryRecording,
    kind_of,
    parse_recording,
)

_HEALTH = {2: "Good", 3: "Overheat", 4: "Dead", 5: "Over voltage", 6: "Failure", 7: "Cold"}
"""`BatteryManager.BATTERY_HEALTH_*`."""
_TEMPERATURE = re.compile(
    r"Temperature\{mValue=(-?[0-9]{1,4}(?:\.[0-9]{1,9})?), mType=(-?[0-9]{1,3}),"
    r" mName=([A-Za-z0-9._-]{1,60}), mStatus=[0-9]\}"
)
_TYPES = frozenset({0, 1, 2, 3, 4, 5, 9})
"""CPU, GPU, battery, skin, USB port, power amplifier, NPU; 6 to 8 are no temperatures."""
_CHARGING = {"Charging": True, "Full": False, "Discharging": False, "Not charging": False}


@dataclass(frozen=True, slots=True)
class BatteryReading:
    """The battery; `None` for a value that the device does not tell.

    Attributes:
        health: as the kernel says it: `Good`, `Overheat`, `Dead`, ...
    """

    level_percent: float | None = None
    charging: bool | None = None
    health: str | None = None
    temperature_c: float | None = None

    @property
    def present(self) -> bool:
        """True if there is a battery that tells anything."""
        return self.level_percent is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """A device at one moment.

    Attributes:
        temperatures: degrees Celsius by zone, of the zones with a plausible one.
        has_sensors: whether it has any that might say a temperature, now or later.
    """

    temperatures: Mapping[str, float]
    battery: BatteryReading
    has_sensors: bool = True


class Sensors:
    """Reads a device's sensors, each time anew.

    Args:
        scripts_dir: our scripts on the device.
    """

    def __init__(self, device: Device, scripts_dir: str) -> None:
        self._device = device
        self._command = ["sh", f"{scripts_dir}/telemetry.sh", "once"]

    def read(self) -> Reading:
        """Return values of the sensors now."""
        recording = parse_recording(self._device.shell(self._command).stdout)
        battery = battery_of(recording)
        if not battery.present:
            # An unrooted phone may deny the files and tell by its service.
            output = self._device.shell(["dumpsys", "battery"], check=False)
            battery = battery_of_service(output.stdout)
        temperatures: Mapping[str, float] = recording.latest("temp_c")
        if not temperatures:
            output = self._device.shell(["dumpsys", "thermalservice"], check=False)
            temperatures = temperatures_of_service(output.stdout)
        if not temperatures and battery.temperature_c is not None:
            temperatures = {"battery": battery.temperature_c}
        files = (*recording.denied, *recording.silent)
        has_zones = any(kind_of(name) == "temp_c" for name in recording.channels)
        has_sensors = has_zones or any("thermal_zone" in name for name in files)
        return Reading(temperatures, battery, bool(temperatures) or has_sensors)


def battery_of(recording: TelemetryRecording) -> BatteryReading:
    """Return the battery by the kernel's files, which have tenths of a degree."""
    words = recording.battery
    level, tenths = _number(words.get("capacity")), _number(words.get("temp"))
    return BatteryReading(
        level_percent=level if level is not None and 0 <= level <= 100 else None,
        charging=_CHARGING.get(words.get("status", "")),
        health=words.get("health"),
        # Below it, the battery is taken to count in whole degrees.
        temperature_c=_plausible(None if tenths is None or abs(tenths) <= 60 else tenths / 10),
    )


def battery_of_service(output: str) -> BatteryReading:
    """Return the battery by `dumpsys battery`."""
    state = parse_battery(output)
    if state is None or state.level_percent is None or not 0 <= state.level_percent <= 100:
        return BatteryReading()
    health = _number(parse_dumpsys(output).get("health"))
    return BatteryReading(
        level_percent=state.level_percent,
        charging=state.charging,
        health=None if health is None else _HEALTH.get(int(health)),
        temperature_c=_plausible(state.temperature_c),
    )


def temperatures_of_service(output: str) -> Mapping[str, float]:
    """Return degrees Celsius by sensor, of `dumpsys thermalservice` (Android 10 and later)."""
    temperatures: dict[str, float] = {}
    for match in _TEMPERATURE.finditer(output):
        value = float(match[1])
        plausible = COLDEST_C <= value <= HOTTEST_C and value != 0
        if plausible and int(match[2]) in _TYPES and len(temperatures) < 64:
            temperatures[match[3]] = value  # the HAL's follow the service's older copies
    return temperatures


def _plausible(celsius: float | None) -> float | None:
    return celsius if celsius is not None and -30 <= celsius <= 90 else None


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch("-?[0-9]{1,9}", text) else None
