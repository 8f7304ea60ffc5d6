"""Event log of a device: boots, faults and failures, one JSON line each, beside its record."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
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
class LoggedEvent:
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
    """Log of one device's events.

    Args:
        write: takes one line.
        on_event: called with each event.
    """

    def __init__(
        self, write: Callable[[bytes], None], on_event: Callable[[LoggedEvent], None]
    ) -> None:
        self._write = write
        self._on_event = on_event

    def add(self, kind: EventKind, fault: str = "", detail: str = "") -> None:
        """Append an event with the current time; on a full disk it is lost."""
        event = LoggedEvent(time.time(), kind, fault, detail)
        self._on_event(event)
        try:
            self._write(json.dumps(asdict(event)).encode() + b"\n")
        except OSError as error:
            log.warning("an event is lost: %s: %s", error, event)


class EventFile:
    """File of events in a device's folder; each line is one write, so readers see whole lines.

    The last 4 MiB at least are kept, and no more than twice that.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS_NAME
        self._descriptor = os.open(self._path, _FLAGS, 0o600)

    def write(self, line: bytes) -> None:
        """Append a line."""
        if os.fstat(self._descriptor).st_size > _MAX_BYTES:
            self._turn_over()
        os.write(self._descriptor, line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _turn_over(self) -> None:
        self._path.rename(self._path.with_name(OLDER_NAME))
        descriptor = os.open(self._path, _FLAGS, 0o600)
        os.close(self._descriptor)
        self._descriptor = descriptor


def read_events(folder: Path) -> tuple[LoggedEvent, ...]:
    """Return a device's events that are kept, oldest first; malformed lines are left out."""
    lines = [*_lines(folder / OLDER_NAME), *_lines(folder / EVENTS_NAME)]
    return tuple(event for line in lines if (event := _parse(line)) is not None)


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _parse(line: str) -> LoggedEvent | None:
    try:
        content: Any = json.loads(line)
        return LoggedEvent(
            float(content["at"]), content["kind"], str(content["fault"]), str(content["detail"])
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
