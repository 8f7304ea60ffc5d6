"""Conversion of a sensor file's text to a plausible number, in the unit of its channel."""

import re
from typing import NamedTuple

_INTEGER = re.compile(r"-?[0-9]{1,18}")

COLDEST_C, HOTTEST_C = -30.0, 125.0
"""Outside of these no phone works; what its sensors then say is something else."""
_SENTINELS_C = frozenset({-40.0, 127.0})
"""Values of sensors that are missing, unpowered or not ready; 0 is one too."""


class _Quantity(NamedTuple):
    """Between `lowest` and `highest`; nearer to 0 than `least` it counts in another unit."""

    unit: str
    lowest: float
    highest: float
    least: float = 0.0


_QUANTITIES = {
    "temp_c": _Quantity("degC", COLDEST_C, HOTTEST_C, least=1.25),  # else in whole or tenths of one
    "cpu_hz": _Quantity("Hz", 1e6, 1e10),
    "cpu_cap_hz": _Quantity("Hz", 1e6, 1e10),
    "ddr_hz": _Quantity("Hz", 1e6, 2e10),
    "gpu_hz": _Quantity("Hz", 1e6, 1e10),
    "rss_bytes": _Quantity("bytes", 1, 1e13),
    "rss_peak_bytes": _Quantity("bytes", 1, 1e13),
    "battery_a": _Quantity("A", -30, 30, least=0.03),  # else in milliamperes
    "battery_v": _Quantity("V", 1, 60),
}
_PER_WIRE_UNIT = {"mC": 1e3, "uA": 1e6, "uV": 1e6}
_WIRE_UNITS = {"kHz": 1000, "Hz": 1, "kB": 1024}


def kind_of(channel: str) -> str:
    """Return the quantity of a channel: `temp_c` of `temp_c:cpu-0-0`."""
    return channel.partition(":")[0]


def unit_of(channel: str) -> str | None:
    """Return the unit of a channel's values; `None` for a channel that is not known."""
    quantity = _QUANTITIES.get(kind_of(channel))
    return None if quantity is None else quantity.unit


def parse_value(text: str, wire_unit: str, channel: str, *, page_bytes: int) -> float | None:
    """Return a value of a channel; `None` if it is not a plausible number.

    Args:
        text: as the file said it.
        wire_unit: in which it counts: `mC`, `kHz`, `Hz`, `uA`, `uV`, `kB`, `pages`.
        channel: e.g. `temp_c:cpu-0-0`.
        page_bytes: size of a page of memory on the device.
    """
    quantity = _QUANTITIES.get(kind_of(channel))
    if quantity is None or not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    if wire_unit in _PER_WIRE_UNIT:
        value = number / _PER_WIRE_UNIT[wire_unit]
    elif wire_unit == "pages":
        value = float(number * page_bytes)
    elif wire_unit in _WIRE_UNITS:
        value = float(number * _WIRE_UNITS[wire_unit])
    else:
        return None
    if quantity.unit == "degC" and value in _SENTINELS_C:
        return None
    if abs(value) <= quantity.least:
        return None
    return value if quantity.lowest <= value <= quantity.highest else None
