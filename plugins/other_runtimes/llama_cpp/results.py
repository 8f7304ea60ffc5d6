"""Readers of what llama.cpp's programs print, and of llama-bench's results in all forms of `-o`.

Sources: see `plugins.other_runtimes.llama_cpp.output` for what they print; "Output formats" of
https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench: json, jsonl, csv, sql and md.
JSON has each repetition; the other forms have only the mean of a test, which becomes its one
repetition. A table in markdown has no time, and names its settings as llama-bench shows them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PureWindowsPath

from harness.importing.csv_files import read_rows
from harness.importing.json_files import canonical, of_entries
from harness.importing.logs import log_lines
from harness.importing.records import Entries, FileFormat, ForeignRun, UnreadableError
from harness.runtimes.json_values import UNREADABLE, Entry, reason_of
from plugins.other_runtimes.llama_cpp.output import LlamaBenchTest, timings_of
from plugins.other_runtimes.log_queries import LogQuery, count_of, query_of


def read_test(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read one test: prompt processing, text generation, or both."""
    test = LlamaBenchTest.of(entry)
    yield ForeignRun(
        line,
        "llama-bench",
        source=canonical(entry),
        model=test.kind if test.filename is None else PureWindowsPath(test.filename).stem,
        prompt_tokens=test.prompt,
        depth_tokens=test.depth,
        new_tokens=test.generated,
        # What computes is a device of its own: the same machine has a CPU and a GPU.
        device_model=test.computed_by or None,
        container_bytes=test.size_bytes,
        parameters=test.parameters,
        created_at=_moment(entry["test_time"]) if "test_time" in entry else None,
        settings=test.settings,
        versions={"llama.cpp": test.build} if test.build else {},
        repetitions=[{test.metric: speed} for speed in test.speeds],
    )


def read_csv(text: str) -> Entries:
    """Read the tests of `-o csv`."""
    for item in read_rows(text, "build_commit"):
        yield item if isinstance(item, UnreadableError) else (item[0], _typed(item[1]))


_INSERT = re.compile(r"INSERT INTO \w+ \(([\w, ]+)\) VALUES \((.*)\);\s*")
_LONGEST_ROW = 100_000
_SQL_VALUE = re.compile(r"\s*(?:'((?:[^']|'')*)'|([^',]*))\s*(?:,|\Z)")


def read_sql(text: str) -> Entries:
    """Read the rows that `-o sql` inserts."""
    for line, row in enumerate(text.split("\n"), 1):
        if row.startswith("INSERT INTO"):
            match = _INSERT.fullmatch(row) if len(row) < _LONGEST_ROW else None
            if match is None:
                yield UnreadableError(line, "it is no whole INSERT statement")
                continue
            values = [groups[0] or groups[1] for groups in _SQL_VALUE.findall(match[2])]
            values = values[:-1] if values[-1:] == [""] and not match[2].endswith(",") else values
            names = match[1].split(", ")
            if len(names) == len(values):
                yield line, _typed(dict(zip(names, values, strict=True)))
            else:
                yield UnreadableError(line, f"it has {len(values)} values for {len(names)} names")


def _typed(row: Mapping[str, str]) -> Entry:
    texts = {"build_commit", "test_time", "model_filename", "model_type"}
    return {name: value if name in texts else _parsed(value) for name, value in row.items()}


_RULE = re.compile(r"[\s|:-]+")
_TEST = re.compile(r"(?:pp ?([0-9]+))?\+?(?:tg ?([0-9]+))?(?: @ d([0-9]+))?")
_BUILD = re.compile(r"build: (\S{1,60}) \(([0-9]{1,9})\)\s*")
_AMOUNT = re.compile(r"([0-9.]+) (GiB|MiB|B|M)")
_UNITS = {"GiB": 2.0**30, "MiB": 2.0**20, "B": 1e9, "M": 1e6}


def read_markdown(text: str) -> Entries:
    """Read the rows of tables of `-o md`, with the line below that names the build."""
    names: list[str] = []
    rows: list[tuple[int, dict[str, str]]] = []
    for line, row in enumerate([*text.split("\n"), ""], 1):
        cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
        build = _BUILD.fullmatch(row)
        if build is not None or "t/s" in cells:
            yield from _with_build(rows, build.groups() if build else ())
            names, rows = [] if build else cells, []
        elif names and row.lstrip().startswith("|") and not _RULE.fullmatch(row):
            if len(cells) != len(names):
                yield UnreadableError(line, f"it has {len(cells)} cells under {len(names)} names")
                continue
            rows.append((line, dict(zip(names, cells, strict=True))))
    yield from _with_build(rows, ())


def _with_build(rows: Sequence[tuple[int, dict[str, str]]], build: Sequence[str]) -> Entries:
    for line, cells in rows:
        try:
            yield line, _entry_of(cells, build)
        except UNREADABLE as error:
            yield UnreadableError(line, reason_of(error))


def _entry_of(cells: Mapping[str, str], build: Sequence[str]) -> Entry:
    """Convert a row of a table to the fields that the other forms have."""
    texts = dict(cells)
    test = _TEST.fullmatch(texts.pop("test"))
    if test is None:
        raise ValueError(f"test {cells['test']!r} is no pp, tg or both")
    prompt, new, depth = (int(each or 0) for each in test.groups())
    return {
        "model_type": texts.pop("model"),
        "model_size": _amount(texts.pop("size")),
        "model_n_params": _amount(texts.pop("params")),
        "backends": texts.pop("backend"),
        "n_prompt": prompt,
        "n_gen": new,
        "n_depth": depth,
        "avg_ts": _parsed(texts.pop("t/s").partition("±")[0].strip()),
        **dict(zip(("build_commit", "build_number"), build, strict=False)),
        **{name: _parsed(value) for name, value in texts.items()},
    }


def _amount(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    return 0 if match is None else round(float(match[1]) * _UNITS[match[2]])


def _parsed(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _moment(text: object) -> datetime:
    moment = datetime.fromisoformat(str(text))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_WITH_PROMPT = 0.1
"""The part of the prompt's time by which a load that holds this is longer, at most."""
_LLAMA_FACTS = {
    "build": (re.compile(r"\bbuild(?:: | = )([0-9]{1,9}) \(([0-9a-f]{4,40})\)"), r"\2 (\1)"),
    "model": (re.compile(r"loaded meta data with .{1,80} from (.{1,1000}?) \(version "), r"\1"),
    "precision": (re.compile(r"(?:file type|model ftype) += +(\S.{0,60})"), r"\1"),
    "device": (re.compile(r"using device (\S{1,60}) \((.{1,200}?)\)(?: |$)"), r"\2, \1"),
}


def read_llama_timings(text: str) -> Iterator[ForeignRun]:
    """Read what llama.cpp's programs print at their end, and its server after each request.

    The time to load is llama.cpp's: until the end of its first evaluation, a warm-up. Without one
    that is the prompt, and the time is left out.
    """
    queries: list[LogQuery] = []
    process: dict[str, str] = {}
    for number, line in enumerate(log_lines(text), 1):
        for name, (pattern, fact) in _LLAMA_FACTS.items():
            if (match := pattern.search(line)) is not None:
                process = {} if name in process else process  # told again: it is the next one
                process = {**process, name: match.expand(fact)}
        if figures := timings_of(line):
            query = query_of(queries, number, process, None, figures.keys())
            query.figures |= figures
            query.source += line
    for query in queries:
        process, figures = dict(query.process), query.figures
        if 0 <= figures.get("init_s", 0.0) / figures.get("ttft_s", math.inf) - 1 < _WITH_PROMPT:
            del figures["init_s"]
        yield ForeignRun(
            query.line,
            "llama.cpp",
            source=query.source,
            model=PureWindowsPath(process.get("model", "")).stem,
            precision=process.get("precision"),
            prompt_tokens=count_of(query, "prompt_tokens"),
            new_tokens=count_of(query, "generated_tokens"),
            device_model=process.get("device"),
            versions={"llama.cpp": process["build"]} if "build" in process else {},
            repetitions=[figures],
        )


LLAMA_BENCH = (
    FileFormat('"samples_ts"', of_entries(read_test)),
    FileFormat('^"?build_commit"?,', of_entries(read_test, read_csv)),
    FileFormat(r"^INSERT INTO \w+ \(build_commit", of_entries(read_test, read_sql)),
    FileFormat(r"\| *t/s *\|", of_entries(read_test, read_markdown)),
)
LLAMA_CPP = (FileFormat(r" eval time = |\[ Prompt: [0-9.]+ t/s", read_llama_timings, "log"),)
