"""Importer of other tools' files: which tool wrote one, its runs as ours, all of them or none."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from buildlib.validation import first_fault
from harness.errors import HostFileError, ImportedFileError
from harness.importing.json_files import (
    Entry,
    read_ai_hub_profile,
    read_entries,
    read_genie_profile,
    read_llama_bench,
)
from harness.importing.logs import lines_of, read_etdump, read_executorch, read_mllm
from harness.importing.records import ForeignRun, UnreadableError
from harness.results import provenance
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    Origin,
    Provenance,
    Run,
    Workload,
    new_run_id,
)
from harness.results.store import ResultsStore

MAX_FILE_BYTES = 64 << 20


class Tool(StrEnum):
    """Tools whose files can be imported."""

    LLAMA_BENCH = "llama-bench"
    GENIE = "genie"
    EXECUTORCH = "executorch"
    ETDUMP = "etdump"
    MLLM = "mllm"
    AI_HUB = "ai-hub"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about imported runs that the user knows and their file does not tell.

    Attributes:
        model: overrides the file's.
        emulator: whether the HTP emulator stood in for the NPU.
        created_at: overrides the file's time; by default the file's modification.
    """

    model: str | None = None
    precision: str | None = None
    device: str | None = None
    soc: str = ""
    emulator: bool = False
    created_at: datetime | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    plan: str | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """Outcome of an import.

    Attributes:
        runs: as stored; empty if the file was imported before.
        refused: lines that were left out, each with its number and the reason.
    """

    tool: Tool
    runs: tuple[Run, ...]
    refused: tuple[tuple[int, str], ...] = ()


_ENTRY_READERS: Mapping[Tool, Callable[[int, Entry], ForeignRun]] = {
    Tool.LLAMA_BENCH: read_llama_bench,
    Tool.GENIE: read_genie_profile,
    Tool.AI_HUB: read_ai_hub_profile,
}
_LOG_READERS = {
    Tool.EXECUTORCH: read_executorch,
    Tool.ETDUMP: read_etdump,
    Tool.MLLM: read_mllm,
}
_MARKS: Mapping[Tool, tuple[str, ...]] = {
    Tool.LLAMA_BENCH: ('"samples_ts"',),
    Tool.GENIE: ('"components"',),
    Tool.AI_HUB: ('"execution_summary"',),
    Tool.EXECUTORCH: ("PyTorchObserver ",),
    Tool.ETDUMP: ("event_block_name", " inference took "),
    Tool.MLLM: ("Prefill Speed", "Performance Summary"),
}
"""Texts that only files of a tool have; the first tool that fits is taken."""


def read_runs(
    path: Path, facts: Facts | None = None, *, tool: Tool | None = None, skip: bool = False
) -> Imported:
    """Read a file of another tool as runs of ours, and store nothing.

    Args:
        tool: that wrote it; by default it is found by the content.
        skip: leave out what cannot be read; otherwise it refuses the file.

    Raises:
        ImportedFileError: names the lines that cannot be read, or no tool is known to write this.
        HostFileError: the file cannot be read.
    """
    return _parse(path, *_read(path), facts or Facts(), tool, skip=skip)


def _parse(
    path: Path, content: bytes, written: datetime, facts: Facts, tool: Tool | None, *, skip: bool
) -> Imported:
    text = content.decode("utf-8", "replace")
    tool = tool or _detect(path, text)
    refused: list[tuple[int, str]] = []
    origin = Origin(tool=tool, file=path.name, sha256=hashlib.sha256(content).hexdigest())
    group_id = new_run_id()
    runs: list[Run] = []
    for foreign in _collect(_foreign_runs(tool, text, refused), refused):
        try:
            run = _run_of(foreign, facts, origin, facts.created_at or foreign.created_at or written)
        except UnreadableError as error:
            refused.append((error.line, error.reason))
        else:
            runs.append(run.model_copy(update={"group_id": group_id, "session": len(runs)}))
    if refused and not (skip and runs):
        raise ImportedFileError(path.name, _in_words(refused))
    if not runs:
        raise ImportedFileError(path.name, f"it has no results that {tool} writes")
    return Imported(tool, tuple(runs), tuple(refused))


def import_file(
    store: ResultsStore,
    path: Path,
    facts: Facts | None = None,
    *,
    tool: Tool | None = None,
    skip: bool = False,
) -> Imported:
    """Store what a file of another tool tells, once, and the file with it.

    Raises:
        ImportedFileError, HostFileError: see `read_runs`; nothing is stored.
    """
    content, written = _read(path)
    found = _parse(path, content, written, facts or Facts(), tool, skip=skip)
    is_log = found.tool in _LOG_READERS
    stored = store.import_runs(found.runs, path.name, content, "log" if is_log else "profile")
    return found if stored else Imported(found.tool, ())


def _read(path: Path) -> tuple[bytes, datetime]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error
    if len(content) > MAX_FILE_BYTES:
        raise HostFileError(str(path), f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    return content, written


def _detect(path: Path, text: str) -> Tool:
    for tool, marks in _MARKS.items():
        if any(mark in text for mark in marks):
            return tool
    hint = "; of llama-bench it takes -o json or -o jsonl" if "t/s |" in text else ""
    raise ImportedFileError(
        path.name, f"no known tool writes this: --tool is one of {', '.join(Tool)}{hint}"
    )


def _foreign_runs(tool: Tool, text: str, refused: list[tuple[int, str]]) -> Iterator[ForeignRun]:
    if tool in _LOG_READERS:
        yield from _LOG_READERS[tool](lines_of(text))
        return
    for line, entry in read_entries(text):
        try:
            yield _ENTRY_READERS[tool](line, entry)
        except UnreadableError as error:
            refused.append((error.line, error.reason))


def _collect(runs: Iterable[ForeignRun], refused: list[tuple[int, str]]) -> Iterator[ForeignRun]:
    """Yield the runs up to a line at which the reader gives up."""
    try:
        yield from runs
    except UnreadableError as error:
        refused.append((error.line, error.reason))


def _run_of(foreign: ForeignRun, facts: Facts, origin: Origin, created_at: datetime) -> Run:
    measurements = foreign.measurements()
    model = facts.model or foreign.model or Path(origin.file).stem
    told = {
        "model": model,
        "precision": facts.precision,
        "bytes": foreign.container_bytes,
        "parameters": foreign.parameters,
    }
    identity = json.dumps([origin.tool, told], sort_keys=True).encode()
    try:
        return Run(
            kind="bench",
            status="done",
            created_at=created_at,
            finished_at=created_at,
            labels=facts.labels,
            plan=facts.plan,
            origin=origin,
            container=ContainerInfo(
                model=model,
                sha256=hashlib.sha256(identity).hexdigest(),
                target="",
                ars=(),
                cl=0,
                n_splits=0,
                precision=facts.precision,
                size_bytes=foreign.container_bytes,
                parameters=foreign.parameters,
            ),
            device=DeviceInfo(
                serial=facts.device or foreign.device_model or "imported",
                soc=facts.soc,
                emulator=facts.emulator,
                model=foreign.device_model,
            ),
            workload=Workload(
                runner=foreign.runner,
                prompt_tokens=_prompt_tokens(foreign),
                depth_tokens=foreign.depth_tokens or None,
                max_new_tokens=foreign.new_tokens or None,
                repetitions=len(foreign.repetitions),
                sampler=foreign.settings,
            ),
            provenance=Provenance(
                toolchain=origin.tool,
                toolchain_versions=foreign.versions,
                library_versions={},
                qnnfarm_version=provenance.own_version(),
                host="",
            ),
            measurements=measurements,
        )
    except ValidationError as error:
        fault = first_fault(error, Run)
        raise UnreadableError(foreign.line, f"{fault.key}: {fault.reason}") from error


def _prompt_tokens(foreign: ForeignRun) -> int | None:
    """Return the prompt's length, if it is told or all repetitions share it; 0 is no prompt."""
    if foreign.prompt_tokens is not None:
        return foreign.prompt_tokens or None
    lengths = {values.get("prompt_tokens") for values in foreign.repetitions}
    shared = lengths.pop() if len(lengths) == 1 else None
    return None if shared is None else int(shared)


_MOST_SHOWN = 5


def _in_words(refused: list[tuple[int, str]]) -> str:
    shown = "; ".join(f"line {line}: {reason}" for line, reason in sorted(refused)[:_MOST_SHOWN])
    more = len(refused) - _MOST_SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown
