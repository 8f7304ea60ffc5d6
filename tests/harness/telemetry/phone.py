"""A folder that looks like a phone's sysfs, for scripts that are told of it by QNNFARM_SYS_ROOT."""

from pathlib import Path

ZONES = (
    "soc", "cpu-0-0", "cpu-1-0", "gpuss-0", "nsphvx-0", "xo-therm", "battery", "ddr",
    "pm8550-bcl-lvl0", "no word", "video", "skin-msm-therm",
)  # fmt: skip


def make_sysfs(root: Path) -> Path:
    """Two clusters of CPUs, DDR, a battery, and zones of which some are no temperatures."""
    for cpu in range(8):
        first, last = (0, 5) if cpu < 6 else (6, 7)
        frequency = {"related_cpus": " ".join(map(str, range(first, last + 1)))}
        frequency["scaling_cur_freq"] = "1804800" if first == 0 else "2956800"
        frequency["scaling_max_freq"] = "3532800" if first == 0 else "4320000"
        frequency["scaling_governor"] = "walt"
        frequency["scaling_available_governors"] = "powersave performance walt"
        _write(root / f"devices/system/cpu/cpu{cpu}/cpufreq", frequency)
    for number, kind in enumerate(ZONES):
        temperature = str(32000 + 1000 * number)
        _write(root / f"class/thermal/thermal_zone{number}", {"type": kind, "temp": temperature})
    _write(root / "class/devfreq/soc:qcom,ddr-bw", {"cur_freq": "4224000000"})
    battery = {
        "type": "Battery", "current_now": "-350000", "voltage_now": "4012000", "capacity": "81",
        "temp": "281", "status": "Not charging", "health": "Good",
    }  # fmt: skip
    _write(root / "class/power_supply/battery", battery)
    _write(root / "class/power_supply/usb", {"type": "USB"})
    _write(root / "power", {"wake_lock": "", "wake_unlock": ""})
    return root


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
