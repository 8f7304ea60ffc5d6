"""How actors end, and which ends a fault explains."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.chaos.actors import Actor

Outcome = Literal["right", "wrong", "error", "killed", "interrupted", "hang", "crash"]


@dataclass(frozen=True, slots=True)
class End:
    """How something that was begun ended.

    Attributes:
        error: its type's name.
        text: of the error, or what is wrong.
    """

    who: str
    outcome: Outcome
    error: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.who}: {' '.join(filter(None, (self.outcome, self.error, self.text)))}"


_GONE: Final = {
    "DeviceLostError": "went away",
    "NoDeviceError": "no adb device",
    "DeviceConnectError": "cannot connect",
    "LeaseTimeoutError": "no device was free|is (recovering|absent|quarantined|probation|held)",
}
_LATE: Final = {"DeviceTimeoutError": "took longer"}

EXPLAINED: Final[Mapping[str, Mapping[str, str]]] = {
    "drop": _GONE,
    "stall": _LATE | _GONE,
    "corrupt": {"DeploymentCorruptError": "SHA-256", "LeaseTimeoutError": "quarantined|probation"},
    "full": {
        "DeviceFullError": "is full",
        "DeviceCommandError": r"full or read-only|is full|File too large|No space left",
    },
    "reboot": _GONE,
    "power": _GONE,
    "throttle": _LATE,
    "slow": _LATE,
    "runner:KILL": {"RunnerError": "signal 9|SIGKILL", "DeviceCommandError": "status 137"},
    "runner:STOP": _LATE | {"RunnerError": "had not ended after|took longer"},
    "adb_kill": {"AdbServerError": "adb server"} | _GONE,
    "suspend": {"LeaseLostError": "is lost"} | _LATE,
    "release": {"LeaseLostError": "took it back"},
}
"""The types of errors that name a fault, each with a pattern of what its text says then."""

_SIGNALLED: Final[Mapping[str, Outcome]] = {"kill": "killed", "terminate": "interrupted"}


def unexplained(end: End, struck: Iterable[str]) -> str:
    """Why an end is not what it may be after those faults; empty if it is."""
    kinds = set(struck)
    match end.outcome:
        case "right":
            return ""
        case "killed" | "interrupted":
            causes = {kind for kind, outcome in _SIGNALLED.items() if outcome == end.outcome}
            return "" if causes & kinds else f"{end}: nobody did that"
        case "error":
            if "\n" in end.text or not end.text:
                return f"{end}: its text is no line"
            patterns = [EXPLAINED[kind].get(end.error) for kind in kinds & EXPLAINED.keys()]
            if any(p is not None and re.search(p, end.text, re.IGNORECASE) for p in patterns):
                return ""
            return f"{end}: no error for {', '.join(sorted(kinds)) or 'no fault at all'}"
        case _:
            return str(end)


def end_of(actor: Actor) -> End:
    """How an actor ended that has no more to say than that."""
    last: Mapping[str, Any] = actor.end
    match last["end"]:
        case "well":
            return End(actor.name, "right")
        case "error":
            return End(actor.name, "error", last["type"], last["text"])
        case other:
            return End(actor.name, other, text=last.get("text", ""))
