"""What became of a plan's cells, so that a later run goes on where this one ended.

One file of JSON lines for each plan and results database, appended to while the plan goes on. A
line that says how a cell ended is on the disk (fsync) before anybody is told; a torn last line, as
a crash leaves it, is cut off by the next run. When the plan is begun afresh, the file is replaced
by one that keeps how long cells took, and nothing else of before.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from buildlib.files import atomic_write, sync_folder
from harness.errors import JournalError, PlanBusyError
from harness.paths import state_dir
from harness.plans.outcome import CellOutcome, CellResult, CellStatus
from harness.results.records import now

_FORMAT = 1
_LARGEST = 1 << 30
_MOST_KEPT = 10_000
"""Lines that outlive a fresh beginning; cells of containers that are gone would pile up."""
_ID = re.compile(r"[0-9a-f]{32}")


def journal_path(name: str, plan_file: Path, db: str) -> Path:
    """Where the journal of a plan lies that writes into a results database."""
    identity = json.dumps([str(plan_file.absolute()), db])
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return state_dir() / "plans" / f"{name}-{digest}.jsonl"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the journal knows of a cell in the current run of a plan.

    Attributes:
        status: `left` while it has been begun and did not end: its process died.
        device: the last it ran on.
    """

    status: CellStatus
    device: str
    result: CellResult
    duration_s: float


@dataclass(slots=True)
class _Content:
    campaign: str = ""
    cells: dict[str, Remembered] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    done: dict[str, bytes] = field(default_factory=dict)
    """The newest line of each cell, and of each group, that says how long it took."""


class Journal:
    """The journal of one plan, held by one process at a time; a context manager.

    All methods may be called by several threads. Threads that end cells at the same time share an
    fsync.

    Attributes:
        campaign: 32 hexadecimal digits that stay the same until a plan is begun afresh.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.lock")
        self._writing = threading.Lock()
        self._syncing = threading.Lock()
        self._written = 0
        self._synced = 0
        self._file: int | None = None
        self._broken = ""
        self._content = _Content()

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def campaign(self) -> str:
        """See the class."""
        return self._content.campaign

    def __enter__(self) -> Self:
        """Take the journal and read it.

        Raises:
            PlanBusyError: another process has it.
            JournalError: it cannot be read or written, or a newer qnnfarm wrote it.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._read()
        except Timeout as error:
            raise PlanBusyError(str(self._path)) from error
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise JournalError(str(self._path), error.strerror or str(error)) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give it up."""
        with self._syncing, self._writing:  # threads that are left behind write into no other file
            if self._file is not None:
                os.close(self._file)
                self._file = None
        self._lock.release()

    def begin(self, plan: str, campaign: str, *, fresh: bool) -> None:
        """Go on with what the journal holds, or (`fresh`, or there is nothing) begin anew.

        Args:
            campaign: the identifier of a new beginning.

        Raises:
            JournalError: it cannot be written; what it held is as it was.
        """
        beginning = {"event": "plan", "format": _FORMAT, "plan": plan, "campaign": campaign}
        if not self._content.campaign:
            self._append(beginning)
            self._sync()
        elif fresh:
            self._replace(beginning)
        else:
            return
        self._content.campaign = campaign
        self._content.cells.clear()

    def lost(self) -> set[str]:
        """Keys of the cells that were running when an earlier run of the plan died."""
        return {key for key, known in self._content.cells.items() if known.status == "left"}

    def remembered(self, key: str) -> Remembered | None:
        """What is known of a cell since the plan was begun; `None` if it never was."""
        return self._content.cells.get(key)

    def expected_s(self, key: str, group: str) -> float | None:
        """How long a cell took when it was last done, in any run of the plan."""
        return self._content.durations.get(key, self._content.durations.get(group))

    def cell_begun(self, key: str, device: str) -> None:
        """Write down that a cell is being tried. Survives this process, not the machine."""
        self._append({"event": "begun", "cell": key, "device": device})

    def cells_ended(self, outcomes: Sequence[CellOutcome]) -> None:
        """Write down how cells ended; on the disk when this returns."""
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
        """Put a file in the journal's place, at once, that holds but the durations of before."""
        kept = list(dict.fromkeys(self._content.done.values()))[-_MOST_KEPT:]
        with self._syncing, self._writing:
            old = self._usable()
            try:
                with atomic_write(self._path) as new:
                    os.fchmod(new.fileno(), 0o600)
                    new.write(b"".join([*kept, _line(beginning)]))
                self._file = os.open(self._path, os.O_RDWR | os.O_APPEND)
                os.close(old)
                sync_folder(self._path.parent)
            except OSError as error:
                raise JournalError(str(self._path), error.strerror or str(error)) from error

    def _sync(self) -> None:
        """Bring all that was written before this call to the disk, by one fsync for many calls."""
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
        """The open file, of which all that was written until now is whole."""
        if self._file is None or self._broken:
            raise JournalError(str(self._path), self._broken or "it is closed")
        return self._file

    def _failed(self, error: OSError) -> JournalError:
        """Nothing is written any more: a line that was cut off is to stay the last.

        Nor is fsync tried again, which tells of a write-back that failed only once.
        """
        self._broken = error.strerror or str(error)
        return JournalError(str(self._path), self._broken)

    def _read(self) -> None:
        if self._file is None:
            return
        if os.fstat(self._file).st_size > _LARGEST:
            raise JournalError(str(self._path), f"it is larger than {_LARGEST} bytes: remove it")
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                self._take(json.loads(line), line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = f"line {number} is damaged ({error}): remove it to begin anew"
                raise JournalError(str(self._path), reason) from error

    def _take(self, record: Mapping[str, object], line: bytes) -> None:
        content = self._content
        match record["event"]:
            case "plan":
                if int(str(record["format"])) > _FORMAT:
                    raise JournalError(str(self._path), "a newer qnnfarm wrote it: update qnnfarm")
                content.campaign = _campaign(record["campaign"])
                content.cells.clear()
            case "begun":
                known = Remembered("left", str(record["device"]), CellResult(), 0.0)
                content.cells[str(record["cell"])] = known
            case "ended":
                ended = _ended(record)
                content.cells[str(record["cell"])] = ended
                if ended.status == "done":
                    for key in (str(record["group"]), str(record["cell"])):
                        content.durations[key] = ended.duration_s
                        content.done.pop(key, None)  # the newest comes last
                        content.done[key] = line + b"\n"
            case other:
                raise ValueError(f"unknown event {other!r:.40}")


def _line(record: Mapping[str, object]) -> bytes:
    text = json.dumps({"at": now().isoformat(), **record}, ensure_ascii=True)
    return text.encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


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


def _campaign(value: object) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError("no campaign")
    return value


def _ended(record: Mapping[str, object]) -> Remembered:
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
            return Remembered(status, str(record["device"]), result, duration)
        case _:
            raise ValueError(f"a cell cannot end as {status!r:.40}")
