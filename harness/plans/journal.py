"""Journal of a plan's cells, so that a later run goes on where this one ended.

One file of JSON lines for each plan and results database, appended to while the plan goes on. A
line that says how a cell ended is on the disk (fsync) before observers hear of it; the next run
cuts off a torn last line, as a crash leaves it. A fresh start replaces the file by one that keeps
only how long cells took.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from buildlib.closeable import Closeable
from buildlib.files import atomic_write, sync_folder
from harness.errors import JournalError, WrongUseError
from harness.paths import state_dir
from harness.plans.outcome import CellOutcome, CellResult, CellStatus
from harness.results.records import now

_FORMAT = 1
_LARGEST = 1 << 30
_MOST_KEPT = 10_000
"""Lines that outlive a fresh beginning; cells of containers that are gone would pile up."""
_ID = re.compile(r"[0-9a-f]{32}")


def journal_path(name: str, plan_file: Path, db: str) -> Path:
    """Return the path of the journal of a plan that writes into a results database."""
    identity = json.dumps([str(plan_file.absolute()), db])
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return state_dir() / "plans" / f"{name}-{digest}.jsonl"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """State of a cell since the plan's last fresh start.

    Attributes:
        status: `left` if it began and did not end: its process died.
        device: the last one it ran on.
    """

    status: CellStatus
    device: str
    result: CellResult
    duration_s: float


class Journal(Closeable):
    """Journal of one plan, held by one process at a time; a context manager.

    Thread-safe. Threads that end cells at the same time share an fsync.

    Attributes:
        plan_run_id: 32 hexadecimal digits that stay the same until a fresh start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock")
        self._writing = threading.Lock()
        self._syncing = threading.Lock()
        self._written = 0
        self._synced = 0
        self._file: int | None = None
        self._broken = ""
        self.plan_run_id = ""
        self._cells: dict[str, JournalEntry] = {}
        self._durations: dict[str, float] = {}
        self._done: dict[str, bytes] = {}
        """The newest line of each cell, and of each group, with its duration."""

    def __enter__(self) -> Self:
        """Lock the journal and read it; `WrongUseError` if another process holds it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._read()
        except Timeout as error:
            raise WrongUseError(
                "another `qnnfarm run` works on this plan and database: wait for it, or stop "
                f"it (its journal is {self.path})"
            ) from error
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise JournalError(str(self.path), error.strerror or str(error)) from error
            raise
        return self

    def close(self) -> None:
        """Release it."""
        with self._syncing, self._writing:  # threads left behind must not write into another file
            if self._file is not None:
                os.close(self._file)
                self._file = None
        self._lock.release()

    def begin(self, plan: str, plan_run_id: str, *, fresh: bool) -> None:
        """Go on with the journal, or start fresh if asked to or if it is empty.

        Args:
            plan_run_id: identifier of a fresh start.
        """
        beginning = {"event": "plan", "format": _FORMAT, "plan": plan, "campaign": plan_run_id}
        if not self.plan_run_id:
            self._append(beginning)
            self._sync()
        elif fresh:
            self._replace(beginning)
        else:
            return
        self.plan_run_id = plan_run_id
        self._cells.clear()

    def lost(self) -> set[str]:
        """Return the keys of the cells that were running when an earlier run of the plan died."""
        return {key for key, entry in self._cells.items() if entry.status == "left"}

    def entry(self, key: str) -> JournalEntry | None:
        """Return the state of a cell; `None` if it has not begun since the last fresh start."""
        return self._cells.get(key)

    def expected_s(self, key: str, group: str) -> float | None:
        """Return the duration of a cell when it was last done, in any run of the plan."""
        return self._durations.get(key, self._durations.get(group))

    def record_start(self, key: str, device: str) -> None:
        """Record that a cell is being tried. Survives this process, not the machine."""
        self._append({"event": "begun", "cell": key, "device": device})

    def record_ends(self, outcomes: Sequence[CellOutcome]) -> None:
        """Record how cells ended; on the disk when this returns."""
        for outcome in outcomes:
            self._append(_record(outcome))
        self._sync()

    def _append(self, record: Mapping[str, object]) -> None:
        line = _line(record)
        with self._writing:
            file = self._usable()
            try:
                _write(file, line)
            except OSError as error:
                raise self._failed(error) from error
            self._written += 1

    def _replace(self, beginning: Mapping[str, object]) -> None:
        """Replace the file, atomically, by one that holds only the durations so far."""
        lines = list(dict.fromkeys(self._done.values()))[-_MOST_KEPT:]
        with self._syncing, self._writing:
            old = self._usable()
            try:
                with atomic_write(self.path) as new:
                    os.fchmod(new.fileno(), 0o600)
                    new.write(b"".join([*lines, _line(beginning)]))
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
                os.close(old)
                sync_folder(self.path.parent)
            except OSError as error:
                raise JournalError(str(self.path), error.strerror or str(error)) from error

    def _sync(self) -> None:
        """Flush earlier lines to the disk; many calls share one fsync."""
        with self._writing:
            mine = self._written
        with self._syncing:
            if self._synced >= mine:
                return
            with self._writing:
                file, upto = self._usable(), self._written
            try:
                os.fsync(file)
            except OSError as error:
                raise self._failed(error) from error
            self._synced = upto

    def _usable(self) -> int:
        """Return the open file; every line written to it so far is whole."""
        if self._file is None or self._broken:
            raise JournalError(str(self.path), self._broken or "it is closed")
        return self._file

    def _failed(self, error: OSError) -> JournalError:
        """Refuse all further writes, so that a torn line stays the last.

        Nor is fsync tried again: it reports a failed write-back only once.
        """
        self._broken = error.strerror or str(error)
        return JournalError(str(self.path), self._broken)

    def _read(self) -> None:
        if self._file is None:
            return
        if os.fstat(self._file).st_size > _LARGEST:
            raise JournalError(str(self.path), f"it is larger than {_LARGEST} bytes: remove it")
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                self._take(json.loads(line), line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = f"line {number} is damaged ({error}): remove it to start over"
                raise JournalError(str(self.path), reason) from error

    def _take(self, record: Mapping[str, object], line: bytes) -> None:
        match record["event"]:
            case "plan":
                if int(str(record["format"])) > _FORMAT:
                    raise JournalError(str(self.path), "a newer qnnfarm wrote it: update qnnfarm")
                self.plan_run_id = _plan_run_id(record["campaign"])
                self._cells.clear()
            case "begun":
                entry = JournalEntry("left", str(record["device"]), CellResult(), 0.0)
                self._cells[str(record["cell"])] = entry
            case "ended":
                entry = _ended(record)
                self._cells[str(record["cell"])] = entry
                if entry.status == "done":
                    for key in (str(record["group"]), str(record["cell"])):
                        self._durations[key] = entry.duration_s
                        self._done.pop(key, None)  # the newest comes last
                        self._done[key] = line + b"\n"
            case other:
                raise ValueError(f"unknown event {other!r:.40}")


def _line(record: Mapping[str, object]) -> bytes:
    text = json.dumps({"at": now().isoformat(), **record}, ensure_ascii=True)
    return text.encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _record(outcome: CellOutcome) -> Mapping[str, object]:
    failure = outcome.failures[-1][1] if outcome.failures else None
    return {
        "event": "ended",
        "cell": outcome.cell.key,
        "group": outcome.cell.group,
        "label": outcome.cell.label,
        "status": outcome.status,
        "device": outcome.device,
        "run_id": outcome.result.run_id,
        "summary": outcome.result.summary,
        "values": dict(outcome.result.values),
        "duration_s": round(outcome.duration_s, 4),
        "error": f"{failure.error}: {failure.reason}" if failure else None,
    }


def _plan_run_id(value: object) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError("no campaign")
    return value


def _ended(record: Mapping[str, object]) -> JournalEntry:
    status, values, run_id = record["status"], record["values"], record["run_id"]
    if not isinstance(values, dict):
        raise TypeError("values are a mapping")
    result = CellResult(
        run_id=None if run_id is None else str(run_id),
        summary=str(record["summary"]),
        values={str(key): float(value) for key, value in values.items()},
    )
    duration = float(str(record["duration_s"]))
    match status:
        case "done" | "failed" | "interrupted":
            return JournalEntry(status, str(record["device"]), result, duration)
        case _:
            raise ValueError(f"a cell cannot end as {status!r:.40}")
