"""Conditions for a measured run: established by `prepare.sh`, waited for and restored."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Literal, get_args

from harness.clock import Clock, SystemClock
from harness.deploy.deployment import Deployment
from harness.devices.device import Device
from harness.errors import ConditionsNotMetError, HarnessError, WrongUseError, one_line
from harness.results.records import Condition
from harness.telemetry.charge import ChargeWindow, wait_for_charge
from harness.telemetry.gate import ConditionRecord, OnWait, Outcome, ThermalGate, wait_until_cool
from harness.telemetry.readings import Sensors

Policy = Literal["fail", "continue"]

_log = logging.getLogger(__name__)
_GOVERNOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_RECORD = re.compile(
    r"record\|([a-z_]{1,30}(?:\.[0-9]{1,4})?)\|([a-z-]{1,20})"
    r"\|([^|]{0,200})\|([^|]{0,200})\|([^|]{0,2000})"
)
_MOST_RECORDS = 200
_PREPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a device before a measured run. The defaults wait for nothing.

    Attributes:
        max_temp_c: the hottest zone must be at or below it. With neither this nor `stable_s`
            temperatures are not looked at.
        stable_s: or, no zone may have moved by more than `stable_c` for so long.
        max_wait_s: for the temperature.
        zones: patterns of the zones that count, e.g. `("skin*", "battery")`.
        charge: the window of the battery's charge; also asks for a healthy battery.
        wake_lock: keep the device awake.
        screen_off: turn the screen off, which warms the device.
        fixed_performance: Android's sustained clocks (11 and later, where the vendor has them).
        governor: of all CPUs, where that may be written.
        policy: whether a temperature or charge that does not come about fails the run, or is
            recorded only. An impossible change (a wake lock without root) is always only recorded.
    """

    max_temp_c: float | None = None
    stable_s: float | None = None
    stable_c: float = 0.5
    max_wait_s: float = 600.0
    zones: tuple[str, ...] = ("*",)
    charge: ChargeWindow | None = None
    wake_lock: bool = True
    screen_off: bool = False
    fixed_performance: bool = False
    governor: str | None = None
    policy: Policy = "fail"

    def __post_init__(self) -> None:
        _check("max_temp_c", self.max_temp_c, 0, 120)
        _check("stable_s", self.stable_s, 1, 3600)
        _check("stable_c", self.stable_c, 0, 20)
        _check("max_wait_s", self.max_wait_s, 0, 86400)
        if self.policy not in {"fail", "continue"}:
            raise _wrong("policy", "it is fail or continue")
        if self.governor is not None and not _GOVERNOR.fullmatch(self.governor):
            raise _wrong("governor", f"{self.governor!r} is no governor's name")
        if not self.zones:
            raise _wrong("zones", "at least one pattern is needed")
        if self.charge is not None:
            _check("charge.min_percent", self.charge.min_percent, 0, 100)
            _check("charge.max_percent", self.charge.max_percent, 0, 100)
            _check("charge.max_wait_s", self.charge.max_wait_s, 0, 86400)
            if self.charge.min_percent > self.charge.max_percent:
                raise _wrong("charge", "the lower level is above the upper one")

    @property
    def gate(self) -> ThermalGate | None:
        """Conditions that the run waits for."""
        if self.max_temp_c is None and self.stable_s is None:
            return None
        return ThermalGate(
            self.max_temp_c, self.stable_s, self.stable_c, self.max_wait_s, self.zones
        )

    @property
    def changes(self) -> tuple[str, ...]:
        """Arguments of `prepare.sh`; the screen last, so that it stays off."""
        switches = {
            "wake-lock": self.wake_lock,
            "stay-awake": self.wake_lock,
            "fixed-performance": self.fixed_performance,
            f"governor={self.governor}": self.governor is not None,
            "screen-off": self.screen_off,
        }
        return tuple(change for change, is_on in switches.items() if is_on)


def run_prepare(
    device: Device, scripts_dir: str, mode: Literal["apply", "restore"], *changes: str
) -> tuple[ConditionRecord, ...]:
    """Make changes by their names in `prepare.sh`, or undo all of them, the last one first.

    Every change is noted on the device first. So `apply` begins with undoing those of a session
    that died.
    """
    command = ["sh", f"{scripts_dir}/prepare.sh", mode, device.work_root, *changes]
    return parse_records(device.shell(command, timeout_s=_PREPARE_S).stdout)


def parse_records(output: str) -> tuple[ConditionRecord, ...]:
    """Return the records in the output of `prepare.sh`; lines that are none are left out."""
    matches = filter(None, map(_RECORD.fullmatch, output.splitlines()))
    records = (
        ConditionRecord(
            name=match[1],
            outcome=match[2],  # type: ignore[arg-type]  # checked below
            reason=one_line(match[5]),
            before=one_line(match[3]) or None,
            after=one_line(match[4]) or None,
        )
        for match in matches
        if match[2] in get_args(Outcome)
    )
    return tuple(islice(records, _MOST_RECORDS))


@contextmanager
def meet_conditions(
    conditions: Conditions,
    device: Device,
    deployment: Deployment,
    *,
    on_wait: OnWait | None = None,
) -> Iterator[Sequence[Condition]]:
    """Prepare a device by our scripts on it; with the first argument bound, a `Prepare`."""
    with prepared(device, deployment.scripts_dir, conditions, on_wait=on_wait) as records:
        yield tuple(asdict(record) for record in records)


@contextmanager
def prepared(
    device: Device,
    scripts_dir: str,
    conditions: Conditions,
    *,
    clock: Clock | None = None,
    on_wait: OnWait | None = None,
) -> Iterator[tuple[ConditionRecord, ...]]:
    """Bring a device into the state for a measured run, and back when the block ends.

    The changes are undone however the block ends. If the device is gone by then, the notes of them
    stay on it, and the next preparation begins with undoing them.

    Args:
        device: the caller holds it alone.
        scripts_dir: our scripts on it.
        clock: by default the host's.
        on_wait: told, once, when heat has to be waited for.

    Raises:
        ConditionsNotMetError: too hot or with the wrong charge, and the policy is to fail.
        DeviceError: the device failed.
    """
    clock = clock or SystemClock()
    try:
        records = list(run_prepare(device, scripts_dir, "apply", *conditions.changes))
        sensors = Sensors(device, scripts_dir)
        for record in _gates(sensors, conditions, clock, on_wait):
            records.append(record)
            if conditions.policy == "fail" and _fails(record):
                raise ConditionsNotMetError(
                    device.serial, record.name, record.reason, record.waited_s
                )
        yield tuple(records)
    finally:
        for record in _restore(device, scripts_dir):
            if record.outcome == "not-restored":
                _log.warning("device %s: %s: %s", device.serial, record.name, record.reason)


def _gates(
    sensors: Sensors, conditions: Conditions, clock: Clock, on_wait: OnWait | None
) -> Iterator[ConditionRecord]:
    """Yield the charge's gate first: the temperature must be right when the run begins."""
    if conditions.charge is not None:
        yield from wait_for_charge(lambda: sensors.read().battery, conditions.charge, clock)
    if conditions.gate is not None:
        yield wait_until_cool(lambda: _temperatures(sensors), conditions.gate, clock, on_wait)


def _temperatures(sensors: Sensors) -> Mapping[str, float] | None:
    reading = sensors.read()
    return reading.temperatures if reading.has_sensors else None


def _fails(record: ConditionRecord) -> bool:
    """Return whether it fails: not for want of a battery, but where heat cannot be seen."""
    if record.name == "thermal_gate":
        return record.outcome != "met"
    return record.outcome == "not-met"


def _restore(device: Device, scripts_dir: str) -> tuple[ConditionRecord, ...]:
    try:
        return run_prepare(device, scripts_dir, "restore")
    except HarnessError as error:
        reason = f"left for the next preparation to undo: {one_line(str(error))}"
        return (ConditionRecord("preparation", "not-restored", reason),)


def _wrong(name: str, reason: str) -> WrongUseError:
    return WrongUseError(f"the condition {name} cannot be used: {reason}")


def _check(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise _wrong(name, f"{value:g} is not between {low:g} and {high:g}")
