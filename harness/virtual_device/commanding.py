"""Telling a running device what shall befall it, and reading what did."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.virtual_device.control import Answer, ask
from harness.virtual_device.faults import Fault, parse_fault
from harness.virtual_device.heat.heat import HeatReading, check_changes
from harness.virtual_device.journal import Event, read_events


@dataclass(frozen=True, slots=True)
class DeviceCommands:
    """The switches of one device; all but `events` raise `VirtualDeviceControlError`.

    Attributes:
        folder: the device's own, with its control socket.
    """

    name: str
    folder: Path

    def inject(self, *faults: Fault) -> None:
        """Faults strike from now on."""
        if faults:
            self._ask({"do": "inject", "faults": [str(fault) for fault in faults]})

    def faults(self) -> tuple[Fault, ...]:
        """The faults that can still strike."""
        return tuple(map(parse_fault, self._ask({"do": "faults"})["faults"]))

    def clear(self) -> None:
        """End every fault; what they destroyed stays so, and power that is off stays off."""
        self._ask({"do": "clear"})

    def power_on(self) -> None:
        """Give power back to a device that lost it until told otherwise."""
        self._ask({"do": "power-on"})

    def events(self) -> tuple[Event, ...]:
        """What befell it, oldest first, running or not."""
        return read_events(self.folder)

    def heat(self, **changes: float) -> HeatReading | None:
        """Change settings of the heat model, and read it; `None` while it is off.

        Args:
            changes: fields of `HeatSettings`, `temperature_c` (of SoC and body) and `battery` (0
                to 1). The first change switches the model on.

        Raises:
            HeatSettingError: no such setting, or a value that it cannot have.
        """
        check_changes(changes)
        reading = self._ask({"do": "heat", "changes": changes})["reading"]
        return None if reading is None else HeatReading(**reading)

    def heat_off(self) -> None:
        """Model no heat any more; thermal zones, clocks and the battery vanish."""
        self._ask({"do": "heat-off"})

    def _ask(self, request: Mapping[str, Any]) -> Answer:
        return ask(self.name, self.folder, request)
