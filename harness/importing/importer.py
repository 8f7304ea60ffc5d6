"""Importer of other tools' files: which tool wrote one, its runs as ours, and which are new."""

import codecs
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import ValidationError

from buildlib.entry_points import entry_names, load_entry
from buildlib.validation import first_fault
from harness.errors import HostFileError, WrongUseError
from harness.importing.json_files import of_entries, read_genie_profile
from harness.importing.records import FileFormat, ForeignRun, UnreadableError
from harness.results import provenance, published
from harness.results.nights import PAUSE
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    Origin,
    Provenance,
    Run,
    WorkloadRecord,
    new_run_id,
)
from harness.results.store import ResultsStore

MAX_FILE_BYTES = 64 << 20


DOOR = "importers"
"""Entry points of readers: tuples of `FileFormat`, by the name of the tool whose files they are."""
PUBLISHED = "qnnfarm"
_FORMATS: Mapping[str, tuple[FileFormat, ...]] = MappingProxyType(
    {
        "genie": (FileFormat('"components"', of_entries(read_genie_profile)),),
    }
)


@dataclass(frozen=True, slots=True)
class ImportFacts:
    """Facts about imported runs that the user knows and their file does not tell.

    Attributes:
        model, precision: override the file's.
        emulator: whether the HTP emulator stood in for the NPU.
        created_at: overrides the file's times; by default that of the file's last change stands
            for those that it does not tell.
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
    """A file of another tool as runs of ours.

    Attributes:
        file: its name.
        text: its content.
        runs: those that it tells of; once stored, those that are new.
        lines: on which each of them begins.
        refused: lines that were left out, each with its number and the reason.
        known: number of runs that were stored before.
        kind: of artifact that the file is kept as.
    """

    tool: str
    file: str
    text: str
    runs: tuple[Run, ...]
    lines: tuple[int, ...]
    refused: tuple[tuple[int, str], ...]
    known: int = 0
    kind: Literal["profile", "log"] = "profile"


def tools() -> tuple[str, ...]:
    """Return the names of all tools whose files can be imported."""
    return *_FORMATS, *entry_names(DOOR)


def read_runs(
    path: Path, facts: ImportFacts | None = None, *, tool: str | None = None, skip: bool = False
) -> Imported:
    """Read a file of another tool as runs of ours, and store nothing.

    Args:
        tool: that wrote it; by default it is found by the content.
        skip: leave out unreadable lines; otherwise they refuse the file.

    Raises:
        HostFileError: names the lines that cannot be read, or no tool is known to write this; the
            file cannot be read.
    """
    facts = facts or ImportFacts()
    if path.is_dir():
        return _read_published(path, facts)
    content, changed_at = _read(path)
    text = _decode(content)
    tool, file_format = _find_format(path, text, tool)
    faults: list[tuple[int, str]] = []
    foreign = tuple(_collect(file_format.read(text), faults))
    known_by, group_id = b"", new_run_id()
    runs: dict[int, Run] = {}
    for number, (each, swept) in enumerate(zip(foreign, _sweeps(foreign), strict=True)):
        alone = hashlib.sha256(f"{tool}\n{each.source}".encode())
        known_by = hashlib.sha256(
            known_by + alone.digest() + str(facts.created_at).encode()
        ).digest()
        sha256 = alone.hexdigest() if each.created_at else known_by.hex()
        origin = Origin(tool=tool, file=path.name, sha256=sha256)
        end = (facts.created_at or changed_at) - timedelta(seconds=each.before_end_s)
        began = end if facts.created_at else each.created_at or end
        labels = {**swept, **each.labels, **facts.labels}
        try:
            run = _run_of(each, replace(facts, labels=labels), origin, began)
        except UnreadableError as error:
            faults.append((error.line, error.reason))
        else:
            runs[number] = run.model_copy(update={"group_id": group_id, "session": len(runs)})
    if faults and not (skip and runs):
        raise HostFileError(path.name, _in_words(faults))
    if not runs:
        raise HostFileError(path.name, f"it has no results that {tool} writes")
    lines = tuple(foreign[number].line for number in runs)
    return Imported(
        tool,
        path.name,
        text,
        tuple(runs.values()),
        lines,
        tuple(faults),
        kind=file_format.kind,
    )


def store_runs(store: ResultsStore, found: Imported) -> Imported:
    """Store the runs of a file that are new, and the file with them.

    A run is known by the text that tells of it, in any file. Where it has no time,
    it is known by the runs before it, too, as two nights may give one figure. Of a file that grew,
    the lines from its first new run on are kept.

    Raises:
        ArtifactError: the file cannot be kept; nothing is stored.
    """
    if found.tool == PUBLISHED:
        runs = store.add_runs(found.runs)
        return replace(found, runs=runs, known=len(found.runs) - len(runs))
    origins = store.known_origins(found.tool)
    new: dict[str, tuple[Run, int]] = {}
    for run, line in zip(found.runs, found.lines, strict=True):
        if run.origin is not None and run.origin.sha256 not in origins:
            new.setdefault(run.origin.sha256, (run, line))
    runs = tuple(run for run, _ in new.values())
    if runs:
        first = 1 if len(runs) == len(found.runs) else min(line for _, line in new.values())
        content = "\n".join(found.text.split("\n")[first - 1 :]).encode()
        runs = store.import_runs(runs, found.file, content, found.kind)
    return replace(found, runs=runs, known=len(found.runs) - len(runs))


def _read_published(folder: Path, facts: ImportFacts) -> Imported:
    """Read a folder of `qnnfarm report --public`, whose name is that of its source."""
    path = folder / published.FILE
    text = _decode(_read(path)[0])
    runs = published.read_published(text, str(path), folder.resolve().name)
    if facts.labels:
        runs = tuple(
            run.model_copy(update={"labels": {**run.labels, **facts.labels}}) for run in runs
        )
    return Imported(PUBLISHED, path.name, text, runs, (), ())


def _read(path: Path) -> tuple[bytes, datetime]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        changed_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error
    if len(content) > MAX_FILE_BYTES:
        raise HostFileError(str(path), f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    return content, changed_at


def _decode(content: bytes) -> str:
    """Decode UTF-8, or UTF-16 with its byte-order mark, as PowerShell's `>` writes it."""
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_wide else "utf-8-sig", "replace")


def _find_format(path: Path, text: str, tool: str | None) -> tuple[str, FileFormat]:
    if tool is not None and tool not in tools():
        raise WrongUseError(f"--tool {tool[:80]!r} is none of {', '.join(tools())}")
    for name in tools() if tool is None else (tool,):
        for each in _FORMATS.get(name) or load_entry(DOOR, name):
            if re.search(each.mark, text, re.MULTILINE):
                return name, each
    reason = f"no known tool writes this: --tool is one of {', '.join(tools())}"
    if tool is not None:
        reason = f"it has no results that {tool} writes"
    raise HostFileError(path.name, reason)


def _collect(
    found: Iterator[ForeignRun | UnreadableError], refused: list[tuple[int, str]]
) -> Iterator[ForeignRun]:
    """Yield the runs up to a line at which the reader gives up."""
    try:
        for each in found:
            if isinstance(each, UnreadableError):
                refused.append((each.line, each.reason))
            else:
                yield each
    except UnreadableError as error:
        refused.append((error.line, error.reason))


def _sweeps(found: Sequence[ForeignRun]) -> list[dict[str, str]]:
    """Return labels for settings that differ among the same tests of one night: `n_threads=8`.

    Whoever tries several values asks for figures of their own; a value that another night has is a
    fact of that night.
    """
    tests = defaultdict[tuple[object, ...], list[int]](list)
    nights = defaultdict[tuple[object, ...], int](int)
    newest: dict[tuple[object, ...], datetime] = {}
    for number, each in enumerate(found):
        lengths = (each.prompt_tokens, each.new_tokens, each.depth_tokens)
        kind = (each.runner, each.model, each.precision, each.device_model)
        test = (*kind, *lengths, *each.versions.values())
        if each.created_at is not None:
            nights[test] += each.created_at - newest.get(test, each.created_at) >= PAUSE
            newest[test] = each.created_at
        tests[(*test, nights[test])].append(number)
    labels: list[dict[str, str]] = [{} for _ in found]
    for numbers in tests.values():
        for name in dict.fromkeys(name for number in numbers for name in found[number].settings):
            values = {number: str(found[number].settings.get(name, "")) for number in numbers}
            if len(set(values.values())) > 1:
                for number, value in values.items():
                    labels[number][name] = value
    return labels


def _run_of(foreign: ForeignRun, facts: ImportFacts, origin: Origin, created_at: datetime) -> Run:
    measurements = foreign.measurements()
    model = facts.model or foreign.model or Path(origin.file).stem
    precision = facts.precision or foreign.precision
    facts_of_model = {
        "model": model,
        "precision": precision,
        "bytes": foreign.container_bytes,
        "parameters": foreign.parameters,
    }
    identity = json.dumps([origin.tool, facts_of_model], sort_keys=True).encode()
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
                precision=precision,
                size_bytes=foreign.container_bytes,
                parameters=foreign.parameters,
            ),
            device=DeviceInfo(
                serial=facts.device or foreign.device_model or "imported",
                soc=facts.soc,
                emulator=facts.emulator,
                model=foreign.device_model,
            ),
            workload=WorkloadRecord(
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
    words = "; ".join(f"line {line}: {reason}" for line, reason in sorted(refused)[:_MOST_SHOWN])
    more = len(refused) - _MOST_SHOWN
    return f"{words}; and {more} more" if more > 0 else words
