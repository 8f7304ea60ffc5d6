"""Parser of `dumpsys thermalservice` (Android 10 and later)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.devices.properties import parse_dumpsys
from harness.telemetry.protocol import COLDEST_C, HOTTEST_C

STATUS_NAMES = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
"""`PowerManager.THERMAL_STATUS_*` by number; from `light` on the device slows itself down."""

_STATUSES = {str(number): number for number in range(len(STATUS_NAMES))}
_TEMPERATURE = re.compile(
    r"Temperature\{mValue=(-?[0-9]{1,4}(?:\.[0-9]{1,9})?), mType=(-?[0-9]{1,3}),"
    r" mName=([A-Za-z0-9._-]{1,60}), mStatus=[0-9]\}"
)
_TYPES = frozenset({0, 1, 2, 3, 4, 5, 9})
"""CPU, GPU, battery, skin, USB port, power amplifier, NPU; 6 to 8 are no temperatures."""


@dataclass(frozen=True, slots=True)
class ThermalService:
    """Readings of the thermal service.

    Attributes:
        status: index into `STATUS_NAMES`; `None` where the device has no such service.
        temperatures: degrees Celsius by sensor, the HAL's before the service's older copies.
    """

    status: int | None = None
    temperatures: Mapping[str, float] = field(default_factory=dict)


def parse_thermal_service(output: str) -> ThermalService:
    """Read the output of `dumpsys thermalservice`."""
    status = parse_dumpsys(output).get("Thermal Status", "")
    temperatures: dict[str, float] = {}
    for match in _TEMPERATURE.finditer(output):
        value = float(match[1])
        plausible = COLDEST_C <= value <= HOTTEST_C and value != 0
        if plausible and int(match[2]) in _TYPES and len(temperatures) < 64:
            temperatures[match[3]] = value  # the HAL's follow the cached ones
    return ThermalService(_STATUSES.get(status), temperatures)
