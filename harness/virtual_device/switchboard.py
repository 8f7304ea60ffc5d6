"""What the control socket of a device understands."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.virtual_device.control import Answer
from harness.virtual_device.faults import parse_fault
from harness.virtual_device.heat.heat import Heat
from harness.virtual_device.injection import Injector
from harness.virtual_device.wishes import Wish, Wishes, WishKind


@dataclass(frozen=True, slots=True)
class Switchboard:
    """The parts of a device that its user may command."""

    faults: Injector
    heat: Heat
    wishes: Wishes

    def handle(self, request: Mapping[str, Any]) -> Answer:
        """Do what is asked.

        Raises:
            HarnessError: what is asked for cannot be done.
            ValueError: nothing that is understood.
            KeyError: something is missing from it.
            TypeError: something in it is of another type.
        """
        operations: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "inject": self._inject,
            "faults": self._faults,
            "clear": self._clear,
            "heat": self._heat,
            "heat-off": self._heat_off,
            "power-on": self._power_on,
        }
        operation = operations.get(str(request.get("do")))
        if operation is None:
            raise ValueError("a command of another version of qnnfarm")
        return operation(request)

    def _inject(self, request: Mapping[str, Any]) -> Answer:
        faults = [parse_fault(str(text)) for text in request["faults"]]
        for fault in faults:
            self.faults.arm(fault)
        return {}

    def _faults(self, _: Mapping[str, Any]) -> Answer:
        return {"faults": [str(fault) for fault in self.faults.faults]}

    def _clear(self, _: Mapping[str, Any]) -> Answer:
        self.faults.clear()
        return {}

    def _heat(self, request: Mapping[str, Any]) -> Answer:
        changes = dict(request["changes"])
        if not all(type(value) in {float, int, bool} for value in changes.values()):
            raise ValueError("heat settings are numbers")
        reading = self.heat.change(changes) if changes else self.heat.reading()
        return {"reading": asdict(reading) if reading else None, "settings": self.heat.settings()}

    def _heat_off(self, _: Mapping[str, Any]) -> Answer:
        self.heat.switch_off()
        return {}

    def _power_on(self, _: Mapping[str, Any]) -> Answer:
        self.wishes.add(Wish(WishKind.POWER_ON))
        return {}
