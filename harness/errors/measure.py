"""What goes wrong with measuring: outputs that are not right, and records of what was measured."""

from harness.errors.base import HarnessError, one_line
from harness.errors.store import StoreError


class OutputCheckError(HarnessError):
    """The output was not what it should have been, so its speed says nothing."""

    exit_code = 1

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the output on {self.device} is wrong, so its speed is void: {one_line(self.reason)}"
        )


class TelemetryRecordError(StoreError):
    """A telemetry series that cannot be one."""

    def __init__(self, channel: str, reason: str) -> None:
        super().__init__(channel, reason)
        self.channel = channel
        self.reason = reason

    def __str__(self) -> str:
        return f"telemetry channel {one_line(self.channel)!r} is not usable: {self.reason}"


class OlderSchemaError(StoreError):
    """An older qnnfarm wrote the results database, and it cannot be brought up to date in place."""

    def __init__(self, location: str, found: int, supported: int, reason: str) -> None:
        super().__init__(location, found, supported, reason)
        self.location = location
        self.found = found
        self.supported = supported
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.location} has schema {self.found}, older than {self.supported}, and cannot be "
            f"migrated ({one_line(self.reason)}): copy it to where it can be written"
        )
