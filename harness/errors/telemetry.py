"""What goes wrong before a measured run: the device is not in the state that was asked for."""

from harness.errors.base import HarnessError, one_line
from harness.errors.device import DeviceError


class ConditionsError(HarnessError):
    """Conditions that cannot be asked for."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"the condition {one_line(self.name)} cannot be used: {one_line(self.reason)}"


class ConditionsNotMetError(DeviceError):
    """The device did not come into the state that a measured run needs.

    Attributes:
        condition: which: `thermal_gate`, `charge`, `battery_health`.
        waited_s: for how long it was given the chance.
    """

    def __init__(self, serial: str, condition: str, reason: str, waited_s: float) -> None:
        super().__init__(serial, condition, reason, waited_s)
        self.condition = condition
        self.reason = reason
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"device {self.serial} is not fit for a measured run after {self.waited_s:.0f} s, "
            f"{one_line(self.condition)}: {one_line(self.reason)}"
        )
