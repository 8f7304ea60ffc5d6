"""Which device is meant, before anybody has reached it: `Device(type=..., identifier=...)`."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

from harness.errors import DeviceSpecError

DeviceType = Literal["android", "linux", "local", "virtual"]

_HOST = r"(?:[A-Za-z0-9_.-]{1,64}@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\[\]%-]{0,254}"


class _Form(NamedTuple):
    pattern: re.Pattern[str]
    words: str


_FORMS = {
    "android": _Form(
        re.compile(rf"[A-Za-z0-9\[][A-Za-z0-9._:\[\]%-]{{0,127}}(?:@{_HOST})?"),
        "SERIAL or SERIAL@HOST",
    ),
    "linux": _Form(re.compile(_HOST), "HOST or USER@HOST"),
    "local": _Form(re.compile(""), "nothing"),
    "virtual": _Form(
        re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"),
        "a name of up to 40 letters, digits, '-' and '_'",
    ),
}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its type and identifier, in the vendor's form.

    Attributes:
        identifier: `android`: `SERIAL`, or `SERIAL@HOST` for one at another host's adb server;
            `linux`: `HOST` or `USER@HOST` as `~/.ssh/config` knows it; `virtual`: its name;
            `local`: empty, this machine.

    Raises:
        DeviceSpecError: no device can have that type or identifier.
    """

    type: DeviceType
    identifier: str = ""

    def __post_init__(self) -> None:
        if self.type not in get_args(DeviceType):
            reason = f"the type is one of {', '.join(get_args(DeviceType))}"
            raise DeviceSpecError(f"{self.type}:{self.identifier}", reason)
        form = _FORMS[self.type]
        if not form.pattern.fullmatch(self.identifier):
            raise DeviceSpecError(str(self), f"its identifier is {form.words}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `TYPE:IDENTIFIER`, `local`, or a bare identifier of an Android device.

        Raises:
            DeviceSpecError: it is none of them.
        """
        kind, colon, rest = text.partition(":")
        if text == "local":
            return cls("local")
        if colon and kind in get_args(DeviceType):
            return cls(kind, rest)  # type: ignore[arg-type]
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
