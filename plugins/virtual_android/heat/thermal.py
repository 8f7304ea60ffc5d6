"""The lumped thermal model, and the battery behind it. Pure arithmetic; a model, not hardware.

The SoC is one heat capacity behind one resistance: C dT/dt = P - (T - T_ambient) / R, whose
solution for constant power is exact over any step, so that an idle device needs no ticks. The body
(skin, battery) follows the SoC with a lag and a smaller share of its rise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from harness.errors import VirtualDeviceError

CPUS: Final = 8
MAX_KHZ: Final = 3_000_000
MIN_KHZ: Final = 300_000
DDR_MAX_HZ: Final = 4_000_000_000
DDR_MIN_HZ: Final = 500_000_000

_STEPS = 20
_BODY_SHARE = 0.5
_BODY_SLOWER = 3.0
_BATTERY_WH = 18.0
_VOLTS_EMPTY, _VOLTS_FULL = 3.4, 4.4
_CHARGER_W = 15.0
_SEVERITIES = ((0.0, 1), (0.25, 2), (0.5, 3), (1.0, 4))
"""Share of the way from `throttle_from_c` to `throttle_to_c`, and Android's thermal status."""

STATE_BOUNDS: Final = {"temperature_c": (-40.0, 200.0), "battery": (0.0, 1.0)}
"""Changes of the state rather than of the settings: SoC and body in °C, charge of the battery."""
_BOUNDS = {
    "ambient_c": (-40, 80),
    "capacity_j_per_k": (0.1, 1e5),
    "resistance_k_per_w": (0.01, 1e3),
    "idle_w": (0, 100),
    "core_w": (0, 100),
    "load_w": (0, 1000),
    "throttle_from_c": (0, 200),
    "throttle_to_c": (0, 300),
    "min_speed": (0.01, 1),
    "sustained_speed": (0.05, 1),
    "time_scale": (0.001, 1e5),
}


@dataclass(frozen=True, slots=True)
class HeatSettings:
    """Settings of the model.

    Attributes:
        core_w: power of one core of the host that is fully used, at full clocks.
        load_w: power besides that of the device's processes.
        throttle_from_c: where clocks begin to fall; at `throttle_to_c` they are at `min_speed`
            of their maximum.
        sustained_speed: share of the maximum in fixed performance mode.
        time_scale: seconds of the model in one second.
        charging: whether a charger of 15 W is plugged in.
    """

    ambient_c: float = 25.0
    capacity_j_per_k: float = 20.0
    resistance_k_per_w: float = 9.0
    idle_w: float = 0.4
    core_w: float = 3.0
    load_w: float = 0.0
    throttle_from_c: float = 75.0
    throttle_to_c: float = 95.0
    min_speed: float = 0.25
    sustained_speed: float = 0.7
    time_scale: float = 1.0
    charging: bool = True

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            _check_bounds(name, getattr(self, name), bounds)
        if self.throttle_to_c <= self.throttle_from_c:
            raise VirtualDeviceError(
                f"heat setting throttle_to_c: {self.throttle_to_c:g} is not above throttle_from_c"
            )

    def power_w(self, busy_cores: float) -> float:
        """Return the power of the device while so many cores are busy."""
        return self.idle_w + self.core_w * busy_cores + self.load_w


@dataclass(frozen=True, slots=True)
class HeatState:
    """State of the device at one moment.

    Attributes:
        body_c: of skin and battery.
        level: charge of the battery, 0 to 1.
        power_w: power of the device.
        busy_cores: cores of the host that its processes used in the last step.
    """

    soc_c: float
    body_c: float
    level: float = 0.8
    power_w: float = 0.0
    busy_cores: float = 0.0

    def step(self, settings: HeatSettings, seconds: float, busy_cores: float) -> "HeatState":
        """Return the state after `seconds` of real time with so many busy cores."""
        elapsed = seconds * settings.time_scale
        power = settings.power_w(busy_cores)
        constant = settings.resistance_k_per_w * settings.capacity_j_per_k
        settled = settings.ambient_c + power * settings.resistance_k_per_w
        soc = settled + (self.soc_c - settled) * math.exp(-elapsed / constant)
        body_settled = settings.ambient_c + _BODY_SHARE * (soc - settings.ambient_c)
        lag = math.exp(-elapsed / (constant * _BODY_SLOWER))
        body = body_settled + (self.body_c - body_settled) * lag
        net = (_CHARGER_W if settings.charging else 0.0) - power
        level = min(1.0, max(0.0, self.level + net * elapsed / 3600 / _BATTERY_WH))
        return HeatState(soc, body, level, power, busy_cores)

    def speed(self, settings: HeatSettings) -> float:
        """Return the share of the maximum clock that the temperature allows, in steps of 5 %."""
        hot = self._hot(settings)
        if hot <= 0:
            return 1.0
        free = 1.0 - min(hot, 1.0) * (1.0 - settings.min_speed)
        return max(settings.min_speed, math.floor(free * _STEPS) / _STEPS)

    def status(self, settings: HeatSettings) -> int:
        """Return Android's thermal status: 0 none, 1 light, 2 moderate, 3 severe, 4 critical."""
        hot = self._hot(settings)
        return max((status for share, status in _SEVERITIES if hot > share), default=0)

    def volts(self) -> float:
        """Return the voltage of the battery."""
        return _VOLTS_EMPTY + (_VOLTS_FULL - _VOLTS_EMPTY) * self.level

    def amperes(self, settings: HeatSettings) -> float:
        """Return the current into the battery, negative while it discharges."""
        net = (_CHARGER_W if settings.charging else 0.0) - self.power_w
        if net > 0 and self.level >= 1.0:
            return 0.0
        return net / self.volts()

    def charge_status(self, settings: HeatSettings) -> str:
        """Return the battery's status as Linux names it."""
        if self.amperes(settings) > 0:
            return "Charging"
        return "Full" if settings.charging and self.level >= 1.0 else "Discharging"

    def _hot(self, settings: HeatSettings) -> float:
        span = settings.throttle_to_c - settings.throttle_from_c
        return (self.soc_c - settings.throttle_from_c) / span


def _check_bounds(name: str, value: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low <= value <= high:
        raise VirtualDeviceError(
            f"heat setting {name}: {value:g} is not between {low:g} and {high:g}"
        )


def check_changes(
    changes: Mapping[str, float | bool], settings: HeatSettings | None = None
) -> HeatSettings:
    """Return the settings after changes; those of the state itself are only checked."""
    names = {field.name for field in fields(HeatSettings)}
    for name, value in changes.items():
        if name in STATE_BOUNDS:
            _check_bounds(name, value, STATE_BOUNDS[name])
        elif name not in names or isinstance(value, bool) is not (name == "charging"):
            raise VirtualDeviceError(
                f"heat setting {name!r} cannot be {value:g}: there are {', '.join(sorted(names))}"
            )
    new = {name: value for name, value in changes.items() if name in names}
    return replace(settings or HeatSettings(), **new)  # type: ignore[arg-type]
