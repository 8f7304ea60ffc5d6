"""Name of a device, before anything has reached it: `Device(type=..., identifier=...)`."""

from dataclasses import dataclass
from typing import Self

from harness.devices.types import device_types
from harness.errors import WrongUseError


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its type and identifier, in the vendor's form.

    Attributes:
        identifier: `android`: `SERIAL`, or `SERIAL@HOST` for one at another host's adb server;
            `linux`: `HOST` or `USER@HOST` as `~/.ssh/config` knows it; `virtual`: its name;
            `local`: empty, this machine.

    Raises:
        WrongUseError: no device can have that type or identifier.
    """

    type: str
    identifier: str = ""

    def __post_init__(self) -> None:
        kind = device_types().get(self.type)
        if kind is None:
            reason = f"the type is one of {', '.join(device_types())}"
        elif not kind.identifier.fullmatch(self.identifier):
            reason = f"its identifier is {kind.identifier_form}"
        else:
            return
        raise WrongUseError(f"{str(self)!r} names no device: {reason}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `TYPE:IDENTIFIER`, `local`, or a bare identifier of an Android device.

        Raises:
            WrongUseError: it is none of them.
        """
        kind, colon, rest = text.partition(":")
        if text == "local":
            return cls("local")
        if colon and kind in device_types():
            return cls(kind, rest)
        return cls("android", text)

    @property
    def serial(self) -> str:
        """Of an Android device: the name under which its adb server knows it."""
        return self.identifier.partition("@")[0]

    @property
    def host(self) -> str | None:
        """The host that it is behind, or that it is; `None` for this one."""
        if self.type == "linux":
            return self.identifier
        return self.identifier.partition("@")[2] or None if self.type == "android" else None

    def __str__(self) -> str:
        return f"{self.type}:{self.identifier}" if self.identifier else self.type
