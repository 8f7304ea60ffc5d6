"""Files of a phone's `/sys` (temperatures, clocks, battery) in a folder of the device."""

import os
import shutil
from pathlib import Path

from plugins.virtual_android.heat.thermal import (
    CPUS,
    DDR_MAX_HZ,
    DDR_MIN_HZ,
    MAX_KHZ,
    MIN_KHZ,
    HeatSettings,
    HeatState,
)

GOVERNORS = ("schedutil", "performance", "powersave")

_ZONES = ("cpuss-0", "nspss-0", "skin-therm", "battery")
_CPU = "devices/system/cpu"
_DDR = "class/devfreq/ddr"
_BATTERY = "class/power_supply/battery"
_USB = "class/power_supply/usb"
_MAX_READ = 100
_CAREFUL = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
"""A user of the device may have put a FIFO or a link in a file's place."""


class SysFiles:
    """Writer of the files that changed.

    Args:
        folder: the device's own `sys`; exists only while the model is on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shown: dict[str, str] = {}
        self._governor = GOVERNORS[0]

    def remove(self) -> None:
        """Delete all files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._shown.clear()
        self._governor = GOVERNORS[0]

    def governor(self) -> str:
        """Return the governor that was last written to the file of any CPU.

        All CPUs share one policy, so all show it then; an unknown governor is overwritten.
        """
        files = [self._folder / _CPU / f"cpu{n}/cpufreq/scaling_governor" for n in range(CPUS)]
        texts = [_read(file) for file in files]
        choices = [text for text in texts if text in GOVERNORS and text != self._governor]
        self._governor = choices[0] if choices else self._governor
        for file, text in zip(files, texts, strict=True):
            if text and text != self._governor:  # empty: a shell has opened it and writes next
                self._shown.pop(str(file.relative_to(self._folder)), None)
        return self._governor

    def show(self, settings: HeatSettings, state: HeatState, limit: float, status: int) -> None:
        """Write the state, replacing anything that the device's users put in place of the files.

        Args:
            limit: share of the maximum clock that is allowed now.
            status: Android's thermal status, 0 to 4.
        """
        try:
            self._show(settings, state, limit, status)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._shown.clear()
            self._show(settings, state, limit, status)

    def _show(self, settings: HeatSettings, state: HeatState, limit: float, status: int) -> None:
        governor = self.governor()
        for name, value in _battery(settings, state).items():
            self._write(name, value)
        for name, value in _clocks(state, limit, governor).items():
            self._write(name, value)
        for number, (zone, celsius) in enumerate(
            zip(_ZONES, (state.soc_c, state.soc_c, state.body_c, state.body_c), strict=True)
        ):
            base = f"class/thermal/thermal_zone{number}"
            self._write(f"{base}/type", zone)
            self._write(f"{base}/mode", "enabled")
            self._write(f"{base}/temp", str(round(celsius * 1000)))
        for number in range(2):
            self._write(f"class/thermal/thermal_zone{number}/trip_point_0_type", "passive")
            self._write(
                f"class/thermal/thermal_zone{number}/trip_point_0_temp",
                str(round(settings.throttle_from_c * 1000)),
            )
        self._write("class/thermal/cooling_device0/type", "cpufreq-cpu0")
        self._write("class/thermal/cooling_device0/max_state", "20")
        self._write("class/thermal/cooling_device0/cur_state", str(round((1 - limit) * 20)))
        self._write("thermal_status", str(status))

    def _write(self, name: str, value: str) -> None:
        if self._shown.get(name) == value:
            return
        path = self._folder / name
        if name not in self._shown:
            path.parent.mkdir(parents=True, exist_ok=True)
        # One write over the old value: readers never see a partial or empty one.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _CAREFUL, 0o644)
        try:
            os.pwrite(descriptor, value.encode() + b"\n", 0)
            os.ftruncate(descriptor, len(value) + 1)
        finally:
            os.close(descriptor)
        self._shown[name] = value


def _read(file: Path) -> str:
    try:
        descriptor = os.open(file, os.O_RDONLY | _CAREFUL)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _MAX_READ).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _clocks(state: HeatState, limit: float, governor: str) -> dict[str, str]:
    """Return clocks of all CPUs, which change together, and of the memory."""
    highest = round(MAX_KHZ * limit)
    share = {"performance": 1.0, "powersave": 0.0}.get(governor, min(1.0, state.busy_cores))
    current = max(MIN_KHZ, round(highest * share))
    files = {
        "online": f"0-{CPUS - 1}",
        "present": f"0-{CPUS - 1}",
    }
    for number in range(CPUS):
        for name, value in {
            "scaling_cur_freq": current,
            "scaling_max_freq": highest,
            "scaling_min_freq": MIN_KHZ,
            "cpuinfo_max_freq": MAX_KHZ,
            "cpuinfo_min_freq": MIN_KHZ,
            "scaling_available_governors": " ".join(GOVERNORS),
            "scaling_governor": governor,
        }.items():
            files[f"cpu{number}/cpufreq/{name}"] = str(value)
    memory = max(DDR_MIN_HZ, round(DDR_MAX_HZ * limit * share))
    return {f"{_CPU}/{name}": value for name, value in files.items()} | {
        f"{_DDR}/cur_freq": str(memory),
        f"{_DDR}/max_freq": str(DDR_MAX_HZ),
        f"{_DDR}/min_freq": str(DDR_MIN_HZ),
    }


def _battery(settings: HeatSettings, state: HeatState) -> dict[str, str]:
    battery = {
        "type": "Battery",
        "present": "1",
        "technology": "Li-ion",
        "health": "Good" if state.body_c < 60 else "Overheat",
        "status": state.charge_status(settings),
        "capacity": str(round(state.level * 100)),
        "temp": str(round(state.body_c * 10)),
        "voltage_now": str(round(state.volts() * 1e6)),
        "current_now": str(round(state.amperes(settings) * 1e6)),
    }
    return {f"{_BATTERY}/{name}": value for name, value in battery.items()} | {
        f"{_USB}/type": "USB",
        f"{_USB}/online": str(int(settings.charging)),
    }
