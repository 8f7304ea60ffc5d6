"""Reading what Android's own tools print about the device; none of it is trusted."""

import re
from collections.abc import Mapping

from harness.devices.base import Battery, DeviceProperties

_PROPERTY = re.compile(r"^\[([^\]\n]+)\]: \[(.*?)\]$", re.MULTILINE | re.DOTALL)
_MAX_VALUE = 512

DF = "df -Pk"
"""Tells in KiB; with `-kP`, toybox before 0.8.6 counts in halves of one."""


def parse_getprop(output: str) -> dict[str, str]:
    r"""The properties in the output of `getprop`; a value may have several lines.

    >>> parse_getprop("[ro.soc.model]: [SM8750]\n[x]: [a\nb]\nnoise\n")
    {'ro.soc.model': 'SM8750', 'x': 'a\nb'}
    """
    text = output.replace("\r\n", "\n")
    return {match[1]: match[2] for match in _PROPERTY.finditer(text)}


def parse_df(output: str) -> int | None:
    r"""Free bytes in the output of `df -Pk FOLDER`.

    >>> parse_df("Filesystem 1024-blocks Used Available Capacity Mounted on\n/d 9 4 5 45% /data\n")
    5120
    """
    for line in reversed(output.splitlines()):
        # A device's name may hold blanks, so the columns are found by the percentage.
        match = re.search(r"\s(\d{1,18})\s+(\d{1,18})\s+(\d{1,18})\s+(\d+%|-)\s", line)
        if match:
            return int(match[3]) * 1024
    return None


def parse_battery(output: str) -> Battery | None:
    """The output of `dumpsys battery`, whose temperature is in tenths of a degree.

    A battery that is full, or must not be charged, is not charging though a charger is there.
    """
    fields = dict(re.findall(r"^\s*([A-Za-z ]+): (\S+)\s*$", output, re.MULTILINE))
    level, scale = _number(fields.get("level")), _number(fields.get("scale")) or 100
    tenths = _number(fields.get("temperature"))
    powered = [fields[f"{kind} powered"] for kind in _CHARGERS if f"{kind} powered" in fields]
    if level is None and tenths is None and not powered:
        return None
    plugged = "true" in powered if powered else None
    return Battery(
        level_percent=None if level is None else 100 * level / scale,
        temperature_c=None if tenths is None else tenths / 10,
        charging=_CHARGING.get(fields.get("status", ""), plugged),
    )


_CHARGERS = ("AC", "USB", "Wireless", "Dock")
_CHARGING = {"2": True, "3": False, "4": False, "5": False}
"""`BatteryManager.BATTERY_STATUS_*`; 1 is unknown."""


def properties_from(
    serial: str, props: Mapping[str, str], free_bytes: int | None, battery: Battery | None
) -> DeviceProperties:
    """The properties that the harness knows by name."""

    def text(name: str) -> str:
        return printable(props.get(name, ""))

    soc = text("ro.soc.model")
    sdk = _number(text("ro.build.version.sdk"))
    version = text("ro.build.version.release")
    return DeviceProperties(
        serial=serial,
        hardware_serial=text("ro.serialno"),
        manufacturer=text("ro.product.manufacturer"),
        model=text("ro.product.model"),
        soc=soc,
        hexagon=hexagon_of(soc),
        abi=text("ro.product.cpu.abi"),
        android_version=version,
        sdk=sdk,
        emulator="1" in {text("ro.kernel.qemu"), text("ro.boot.qemu")},
        free_bytes=free_bytes,
        battery=battery,
        system=f"Android {version}".strip(),
    )


def printable(value: str) -> str:
    """A value that a device gave, cut, with control characters as spaces."""
    return "".join(c if c.isprintable() else " " for c in value[:_MAX_VALUE]).strip()


def hexagon_of(soc: str) -> str | None:
    """The Hexagon architecture of an SoC of the catalog, e.g. `v79`."""
    from buildlib.errors import UnknownSocError
    from buildlib.targets import find_soc

    try:
        return find_soc(soc).dsp_arch
    except UnknownSocError:
        return None


def _number(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"-?[0-9]{1,9}", text):
        return None
    return int(text)
