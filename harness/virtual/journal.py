"""What befell a device and when: one JSON line an event, in a file beside its record.

Written by the device's process, which may sit in a namespace where the file has no name any more,
hence through a descriptor opened before. Read by whoever wants to match errors with faults.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

EVENTS_NAME = "events.jsonl"

EventKind = Literal["booted", "armed", "struck", "cleared", "off"]

_MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        at: seconds since 1970.
        fault: the fault as text; empty for what no fault caused.
        detail: more about it, e.g. the path of a corrupted file.
    """

    at: float
    kind: EventKind
    fault: str
    detail: str


class EventJournal:
    """Appends events; each is one write, so readers see whole lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def add(self, kind: EventKind, fault: str = "", detail: str = "") -> None:
        """Append an event that happens now."""
        event = Event(time.time(), kind, fault, detail)
        os.write(self._descriptor, json.dumps(asdict(event)).encode() + b"\n")


def open_journal(folder: Path) -> int:
    """A descriptor to append to a device's events; the caller's to close."""
    path = folder / EVENTS_NAME
    if path.exists() and path.stat().st_size > _MAX_BYTES:
        path.replace(path.with_suffix(".jsonl.1"))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def read_events(folder: Path) -> tuple[Event, ...]:
    """All events of a device, oldest first. Lines that are none are left out."""
    try:
        text = (folder / EVENTS_NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(event for line in text.splitlines() if (event := _parse(line)) is not None)


def _parse(line: str) -> Event | None:
    try:
        content: Any = json.loads(line)
        return Event(
            float(content["at"]), content["kind"], str(content["fault"]), str(content["detail"])
        )
    except (ValueError, KeyError, TypeError):
        return None
