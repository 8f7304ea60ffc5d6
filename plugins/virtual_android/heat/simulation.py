"""Heat of a running device: the thermal model, driven by the CPU time of its processes."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from plugins.virtual_android.heat.sysfs import SysFiles
from plugins.virtual_android.heat.thermal import HeatSettings, HeatState, check_changes
from plugins.virtual_android.heat.throttler import Throttler
from plugins.virtual_android.processes import RECENT_S, ProcessTable

log = logging.getLogger(__name__)

_TICK_S = 0.1
_LEAST_STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class HeatReading:
    """The model at one moment.

    Attributes:
        speed: share of the maximum clock.
        status: Android's thermal status, 0 to 4.
        battery: charge, 0 to 1.
    """

    soc_c: float
    body_c: float
    speed: float
    status: int
    power_w: float
    battery: float


class HeatSimulation:
    """Heat model of one device, off until the first change. Belongs to one event loop.

    It is updated at 10 Hz while anything runs on the device, and before a command starts: reading
    the files takes a process. An idle device costs nothing.
    """

    def __init__(self, folder: Path, processes: ProcessTable, throttler: Throttler) -> None:
        self._files = SysFiles(folder)
        self._fixed_performance = folder.parent / "state" / "fixed_performance"
        self._processes = processes
        self._throttler = throttler
        self._settings: HeatSettings | None = None
        self._state = HeatState(0, 0)
        self._at = 0.0
        self._cpu_s = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self._files.remove()

    def change(self, changes: Mapping[str, float | bool]) -> HeatReading:
        """Change settings by name; `temperature_c` and `battery` set the state itself."""
        settings = check_changes(changes, self._settings)
        temperature = changes.get("temperature_c")
        level = changes.get("battery")
        if self._settings is None:
            self._state = HeatState(settings.ambient_c, settings.ambient_c)
            self._at = time.monotonic()
            self._cpu_s = self._processes.cpu_s(self._processes.all())
            self._ticker = asyncio.create_task(self._tick())
        else:
            self._advance()
        self._settings = settings
        power_w = settings.power_w(self._state.busy_cores)
        self._state = replace(self._state, power_w=power_w)
        if temperature is not None:
            self._state = replace(self._state, soc_c=temperature, body_c=temperature)
        if level is not None:
            self._state = replace(self._state, level=level)
        self._show(settings)
        return self._reading(settings)

    def reading(self) -> HeatReading | None:
        """Return the current state; `None` while the model is off."""
        if self._settings is None:
            return None
        self._advance()
        return self._reading(self._settings)

    def switch_off(self) -> None:
        """Stop the model and delete its files."""
        self._settings = None
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self._throttler.limit("heat", 1.0)
        self._files.remove()

    def refresh(self) -> None:
        """Bring the files up to date for a command that is about to start."""
        if self._settings is not None and time.monotonic() - self._at > _LEAST_STEP_S:
            self._advance()

    async def _tick(self) -> None:
        while True:
            await self._processes.any_started()
            self._advance()
            await asyncio.sleep(_TICK_S)

    def _advance(self) -> None:
        if self._settings is None:
            return
        now = time.monotonic()
        elapsed = now - self._at
        if (
            elapsed > _LEAST_STEP_S
        ):  # CPU time comes in ticks of 10 ms: shorter steps would be noise
            cpu_s = self._processes.cpu_s(self._processes.all(RECENT_S))
            busy = max(0.0, cpu_s - self._cpu_s) / elapsed
            self._state = self._state.step(self._settings, elapsed, busy)
            self._at, self._cpu_s = now, cpu_s
        self._show(self._settings)

    def _show(self, settings: HeatSettings) -> None:
        reading = self._reading(settings)
        self._throttler.limit("heat", reading.speed)
        try:
            self._files.show(settings, self._state, reading.speed, reading.status)
        except OSError as error:
            log.warning("the files of the heat model cannot be written: %s", error)

    def _reading(self, settings: HeatSettings) -> HeatReading:
        state = self._state
        speed = state.speed(settings)
        if self._fixed_performance.exists():
            speed = min(speed, settings.sustained_speed)
        return HeatReading(
            soc_c=state.soc_c,
            body_c=state.body_c,
            speed=speed,
            status=state.status(settings),
            power_w=state.power_w,
            battery=state.level,
        )
