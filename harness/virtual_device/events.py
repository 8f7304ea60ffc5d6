"""Event log of a device: boots, faults and failures, one JSON line each, beside its record.

A namespace may hide the folder's path from the device's process, hence it writes through a
descriptor of the folder.
"""

import contextlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger(__name__)

EVENTS_NAME = "events.jsonl"
OLDER_NAME = f"{EVENTS_NAME}.1"

EventKind = Literal["booted", "armed", "struck", "cleared", "off"]

_MAX_BYTES = 4 * 1024 * 1024
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        at: seconds since 1970.
        fault: the fault as text; empty if none caused the event.
        detail: more about it, e.g. the path of a corrupted file.
    """

    at: float
    kind: EventKind
    fault: str
    detail: str


class EventLog:
    """Appends events in one write each, so readers see whole lines.

    The last 4 MiB at least are kept, and no more than twice that.

    Args:
        folder: a descriptor of the device's folder, which stays the caller's.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._descriptor = os.open(EVENTS_NAME, _FLAGS, 0o600, dir_fd=folder)

    def add(self, kind: EventKind, fault: str = "", detail: str = "") -> None:
        """Append an event with the current time; on a full disk it is lost."""
        event = Event(time.time(), kind, fault, detail)
        try:
            if os.fstat(self._descriptor).st_size > _MAX_BYTES:
                self._turn_over()
            os.write(self._descriptor, json.dumps(asdict(event)).encode() + b"\n")
        except OSError as error:
            log.warning("an event is lost: %s: %s", error, event)

    def close(self) -> None:
        """Close the log."""
        os.close(self._descriptor)

    def _turn_over(self) -> None:
        os.rename(EVENTS_NAME, OLDER_NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        descriptor = os.open(EVENTS_NAME, _FLAGS, 0o600, dir_fd=self._folder)
        os.close(self._descriptor)
        self._descriptor = descriptor


def read_events(folder: Path) -> tuple[Event, ...]:
    """Return a device's events that are kept, oldest first; malformed lines are left out."""
    lines = [*_lines(folder / OLDER_NAME), *_lines(folder / EVENTS_NAME)]
    return tuple(event for line in lines if (event := _parse(line)) is not None)


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _parse(line: str) -> Event | None:
    try:
        content: Any = json.loads(line)
        return Event(
            float(content["at"]), content["kind"], str(content["fault"]), str(content["detail"])
        )
    except (ValueError, KeyError, TypeError):
        return None
