"""Readers of logs: ExecuTorch's runners and inspector, llama.cpp's programs, mllm's runners.

Sources:
    `qnn_llama_runner`: see `harness.runtimes.executorch`; as in pull request 7175.
    ETDump: "Inspector APIs", https://docs.pytorch.org/executorch/stable/model-inspector.html
        (`print_data_tabular`, `save_data_to_tsv`); and `qnn_executor_runner`'s "N inference took".
    llama.cpp: see `harness.runtimes.llama_cpp.output`.
    mllm: https://github.com/UbiquitousLearning/mllm, `tools/mllm-llm-benchmark` (its README, and
        `--output_csv`), `mllm/models/ARGeneration.cpp` (`perfSummary`), and version 1's demo of
        Qwen on the NPU.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePosixPath, PureWindowsPath

from harness.importing.csv_files import read_rows
from harness.importing.json_files import moment_of
from harness.importing.records import Entries, ForeignRun, UnreadableError
from harness.runtimes.executorch import OBSERVER, parse_report
from harness.runtimes.json_values import Entry
from harness.runtimes.llama_cpp.output import timings_of

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,3})?)"


def _lines(text: str) -> list[str]:
    """Split a log into lines without colours; line n is element n - 1."""
    return [_COLOUR.sub("", line[:100_000].rstrip("\r")) for line in text.split("\n")]


@dataclass(slots=True)
class _Query:
    """A query, of which several lines of a log tell.

    Attributes:
        line: on which it begins.
        process: what the log tells of the process that ran it.
        began_s: when the process began, by a clock that counts from 1970; 0 if nothing tells.
        told: names of the figures that its lines had.
        source: the text that tells of it.
    """

    line: int
    process: Mapping[str, str]
    began_s: float = 0.0
    told: set[str] = field(default_factory=set)
    figures: dict[str, float] = field(default_factory=dict)
    source: str = ""


def _query_of(
    queries: list[_Query],
    line: int,
    process: Mapping[str, str],
    prompt: object,
    told: AbstractSet[str],
) -> _Query:
    """Return the query of a line's figures: the next where the last has them, or other tokens."""
    last = queries[-1] if queries else None
    if (
        last is None
        or last.process != process
        or last.told & told
        or (prompt is not None and last.figures.get("prompt_tokens", prompt) != prompt)
    ):
        last = _Query(line, process)
        queries.append(last)
    last.told |= told
    return last


_MODEL_PATH = re.compile(r"model_path=([^\s,]{1,1000})")
_RUNNER = re.compile(r"executorch:(qnn_[a-z0-9_]{1,60}_runner)\.cpp")
_COUNTS = re.compile(r"Prompt Tokens:\s*([0-9]{1,9})\s+Generated Tokens:\s*([0-9]{1,9})")
_SPAN = re.compile(
    r"(Model Load Time|Total inference time|Prompt evaluation|Generated (?=[0-9]+ tokens:)"
    rf"|Time to first generated token)[^:]*:\s*{_NUMBER} \(seconds\)(?:\s*Rate:\s*{_NUMBER} )?"
)
_SPANS = {
    "Model Load Time": ("init_s", 2),
    "Total inference time": ("elapsed_s", 2),
    "Prompt evaluation": ("prefill_tokens_per_s", 3),
    "Generated ": ("decode_tokens_per_s", 3),
    "Time to first generated token": ("ttft_s", 2),
}
"""Metrics of `print_report`'s lines, and whether they are the seconds or the rate."""


def read_executorch(text: str) -> Iterator[ForeignRun | UnreadableError]:
    """Read a runner's log: one repetition for each query of a process.

    Of a query tell a report in JSON, the lines of `print_report`, or both, in any order: the lines
    then tell what the report does not.
    """
    queries: list[_Query] = []
    process = {"number": "", "model": "", "runner": "qnn_llama_runner"}
    for number, line in enumerate(_lines(text), 1):
        if (match := _MODEL_PATH.search(line)) is not None:
            process = {**process, "number": str(number), "model": PurePosixPath(match[1]).stem}
        if (match := _RUNNER.search(line)) is not None:
            process = {**process, "runner": match[1]}
        _, mark, report = line.partition(OBSERVER)
        try:
            figures, began_s = parse_report(report) if mark else (_printed(line), 0.0)
        except ValueError as error:
            yield UnreadableError(number, str(error))
            continue
        if not figures:
            continue
        prompt, told = figures.get("prompt_tokens"), {OBSERVER} if mark else figures.keys()
        query = _query_of(queries, number, process, prompt, told)
        if mark:
            query.figures |= figures
            query.source, query.began_s = report, began_s
        else:
            query.figures = figures | query.figures
            query.source += "" if OBSERVER in query.told else line
    speaking = [query for query in queries if query.figures.keys() - _LENGTHS]
    for _, group in groupby(
        speaking, lambda each: (each.process, each.figures.get("prompt_tokens"), each.began_s)
    ):
        same = list(group)
        first = same[0]
        yield ForeignRun(
            first.line,
            first.process["runner"],
            source="".join(query.source for query in same),
            model=first.process["model"],
            prompt_tokens=_count(first, "prompt_tokens"),
            new_tokens=_count(first, "generated_tokens"),
            created_at=moment_of(first.began_s),
            repetitions=[query.figures for query in same],
        )


def _count(query: _Query, metric: str) -> int | None:
    return int(query.figures.get(metric, 0)) or None


def _printed(line: str) -> dict[str, float]:
    """Return the figures of a line of `print_report`."""
    if (match := _COUNTS.search(line)) is not None:
        return {"prompt_tokens": float(match[1]), "generated_tokens": float(match[2])}
    if (match := _SPAN.search(line)) is not None:
        metric, place = _SPANS[match[1]]
        return {} if match[place] is None else {metric: float(match[place])}
    return {}


_LENGTHS = {"prompt_tokens", "generated_tokens"}
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
    queries: list[_Query] = []
    process: dict[str, str] = {}
    for number, line in enumerate(_lines(text), 1):
        for name, (pattern, fact) in _LLAMA_FACTS.items():
            if (match := pattern.search(line)) is not None:
                process = {} if name in process else process  # told again: it is the next one
                process = {**process, name: match.expand(fact)}
        if figures := timings_of(line):
            query = _query_of(queries, number, process, None, figures.keys())
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
            prompt_tokens=_count(query, "prompt_tokens"),
            new_tokens=_count(query, "generated_tokens"),
            device_model=process.get("device"),
            versions={"llama.cpp": process["build"]} if "build" in process else {},
            repetitions=[figures],
        )


_CELL = re.compile(r"[│|\t]|\s{2,}")
_AVERAGE = re.compile(r"avg \((s|ms|us|ns)\)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_EVENTS = {
    "Method::execute": "inference_s",
    "Method::init": "init_s",
    "Program::load_method": "init_s",
}
_TOOK = re.compile(rf"([0-9]{{1,9}}) inference took {_NUMBER} ms, avg {_NUMBER} ms")


def read_etdump(text: str) -> Iterator[ForeignRun]:
    """Read what the inspector prints or saves of ETDumps, or `qnn_executor_runner` of its calls.

    Each table is a run. It has averages over all calls; other rows (operators, delegates in cycles)
    are left out.
    """
    run = ForeignRun(1, "qnn_executor_runner", source="")
    columns: list[str] = []
    for number, line in enumerate(_lines(text), 1):
        cells = [cell.strip() for cell in _CELL.split(line.strip(" │|")) if cell.strip()]
        if "event_name" in cells:
            if run.repetitions or run.session:
                yield run
            run, columns = ForeignRun(number, "qnn_executor_runner", source=""), cells
        elif columns and (event := next((cell for cell in cells if cell in _EVENTS), None)):
            value = _average(number, columns, cells)
            run.source += line
            if _EVENTS[event] == "inference_s":
                run.repetitions.append({"inference_s": value})
            else:  # loading contains the initialization, and comes after it
                run.session[_EVENTS[event]] = max(value, run.session.get(_EVENTS[event], 0.0))
        elif (match := _TOOK.search(line)) is not None:
            run.source += line
            run.repetitions.append({"inference_s": float(match[3]) * 1e-3})
    if run.repetitions or run.session:
        yield run


def _average(number: int, columns: Sequence[str], cells: Sequence[str]) -> float:
    # A box has the row's number before the first column; empty cells come only at the end.
    shift = 1 if cells and cells[0].isdigit() else 0
    for place, name in enumerate(columns):
        unit = _AVERAGE.fullmatch(name)
        if unit is not None and place + shift < len(cells):
            match = re.fullmatch(_NUMBER, cells[place + shift])
            if match is None:
                raise UnreadableError(number, f"{cells[place + shift][:40]!r} is no average time")
            return float(match[1]) * _SECONDS[unit[1]]
    raise UnreadableError(number, "the table has no column avg with a unit of time")


_FIGURES: Mapping[str, tuple[str, float]] = {
    "TTFT ms": ("ttft_s", 1e-3),
    "TTFT us": ("ttft_s", 1e-6),
    "Prefill Speed tokens/s": ("prefill_tokens_per_s", 1.0),
    "Decode Speed tokens/s": ("decode_tokens_per_s", 1.0),
    "Prefill time tokens/s": ("prefill_tokens_per_s", 1.0),
    "Decode time tokens/s": ("decode_tokens_per_s", 1.0),
    "Prefill tokens": ("prompt_tokens", 1.0),
    "Prefill Tokens": ("prompt_tokens", 1.0),
}
"""Figures of mllm by name and unit."""
_FIGURE = re.compile(
    r"^\s*(TTFT|Prefill (?:Speed|time|tokens|Tokens)|Decode (?:Speed|time))\s*:\s*(.*)$"
)
_VALUE = re.compile(rf"{_NUMBER}\s*(ms|us|tokens/s)?\)?$")
_NO_FIGURE = re.compile(r"\(?-?(?:nan|inf)\b")
_MICRO = re.compile("[\u00b5\u03bc]")  # the sign, and the Greek letter
_LENGTH = re.compile(r"^\s*(Prompt|Generation) Length \((PP|TG)\)\s*:\s*([0-9]{1,9})\s*$")
_BENCHMARK = re.compile(r"^Create Benchmark: (.{1,200})$")
_BUILD = re.compile(r"^MLLM Build Version\s*: (.{1,100})$")
_QUERY = re.compile(r"^\s*Run [0-9]{1,9} of [0-9]{1,9}|Performance Summary|^Prefill Tokens: ")


def read_mllm(text: str) -> Iterator[ForeignRun]:
    """Read a log of mllm: one repetition for each round or summary; averages are left out."""
    header = {"model": "", "version": "", "PP": "", "TG": ""}
    run: ForeignRun | None = None
    for number, each in enumerate(_lines(text), 1):
        line = each.removeprefix("[A] ")  # version 1 prints its figures after the answer's mark
        if (match := _BENCHMARK.match(line)) is not None:
            header["model"] = match[1].strip()
            if run is not None:
                yield run
                run = None
        elif (match := _BUILD.match(line)) is not None:
            header["version"] = match[1].strip()
        elif (match := _LENGTH.match(line)) is not None:
            header[match[2]] = match[3]
            if run is not None:
                yield run
                run = None
        if _QUERY.search(line) is not None:
            run = run or _mllm_run(number, header)
            run.repetitions.append({})
        if run is not None and (match := _FIGURE.match(line)) is not None:
            run.source += line
            run.repetitions[-1].update(_figure(number, match[1], match[2]))
    if run is not None:
        yield run


def _mllm_run(number: int, told: Mapping[str, str]) -> ForeignRun:
    return ForeignRun(
        number,
        "mllm",
        source="",
        model=told["model"],
        versions={"mllm": told["version"]} if told["version"] else {},
        prompt_tokens=int(told["PP"]) if told["PP"] else None,
        new_tokens=int(told["TG"]) if told["TG"] else None,
    )


def _figure(number: int, name: str, text: str) -> dict[str, float]:
    match = _VALUE.search(_MICRO.sub("u", text.strip()))
    unit = (match[2] or "") if match else ""
    key = f"{name} {unit}".strip()
    if match is not None and key in _FIGURES:
        metric, scale = _FIGURES[key]
        return {metric: float(match[1]) * scale}
    if (match is not None and name.endswith("time") and unit) or _NO_FIGURE.match(text.strip()):
        return {}  # a phase that was too short for a rate has only its duration
    raise UnreadableError(number, f"{name} is {text.strip()[:40]!r}, no figure with a unit")


def read_mllm_csv(text: str) -> Entries:
    """Read the rows of `mllm-llm-benchmark --output_csv`."""
    return read_rows(text, "schema_version")


def read_mllm_means(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read such a row: the means of a pair of lengths."""
    ttft_ms, prefill_ms = float(entry["ttft_ms"]), float(entry["prefill_ms"])
    if ttft_ms < prefill_ms / 2:  # a release divides by the rounds after a division by three
        raise ValueError(
            f"the first token cannot come after {ttft_ms:g} ms where the prompt takes "
            f"{prefill_ms:g}: this mllm divides its means twice; import its log"
        )
    yield ForeignRun(
        line,
        "mllm",
        source=",".join(entry.values()),
        model=entry["model_name"],
        prompt_tokens=int(entry["pp"]),
        new_tokens=int(entry["tg"]),
        device_model=entry["arch"],
        settings={key: int(entry[key]) for key in ("cache_length",) if key in entry},
        versions={"mllm": entry["git_commit"]},
        repetitions=[
            {
                "ttft_s": ttft_ms * 1e-3,
                "prefill_tokens_per_s": float(entry["prefill_speed"]),
                "decode_tokens_per_s": float(entry["decode_speed"]),
            }
        ],
    )
