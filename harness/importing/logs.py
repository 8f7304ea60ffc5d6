"""Readers of logs: ExecuTorch's runners and inspector, mllm's runners.

Sources:
    `qnn_llama_runner`: see `harness.runtimes.executorch`; as in pull request 7175.
    ETDump: "Inspector APIs", https://docs.pytorch.org/executorch/stable/model-inspector.html
        (`print_data_tabular`, `save_data_to_tsv`); and `qnn_executor_runner`'s "N inference took".
    mllm: https://github.com/UbiquitousLearning/mllm, `tools/mllm-llm-benchmark/README.md`,
        `mllm/models/ARGeneration.cpp` (`perfSummary`), and version 1's demo of Qwen on the NPU.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from harness.importing.json_files import moment_of
from harness.importing.records import ForeignRun, UnreadableError
from harness.runtimes.executorch import OBSERVER, parse_report

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,3})?)"


def _lines(text: str) -> list[str]:
    """Split a log into lines without colours; line n is element n - 1."""
    return [_COLOUR.sub("", line[:100_000].rstrip("\r")) for line in text.split("\n")]


_MODEL_PATH = re.compile(r"model_path=([^\s,]{1,1000})")
_RUNNER = re.compile(r"executorch:(qnn_[a-z0-9_]{1,60}_runner)\.cpp")


def read_executorch(text: str) -> Iterator[ForeignRun]:
    """Read a runner's log: one repetition for each query of a process that it reports."""
    model, runner = "", "qnn_llama_runner"
    run: ForeignRun | None = None
    start_of_run = 0.0
    for number, line in enumerate(_lines(text), 1):
        if (match := _MODEL_PATH.search(line)) is not None:
            model = PurePosixPath(match[1]).stem
        if (match := _RUNNER.search(line)) is not None:
            runner = match[1]
        _, mark, report = line.partition(OBSERVER)
        if not mark:
            continue
        try:
            metrics, start_s = parse_report(report)
        except ValueError as error:
            raise UnreadableError(number, str(error)) from error
        prompt, new = (int(metrics[key]) for key in ("prompt_tokens", "generated_tokens"))
        if run is None or (run.prompt_tokens, run.model, start_of_run) != (prompt, model, start_s):
            if run is not None:
                yield run
            run = ForeignRun(
                number,
                runner,
                source="",
                model=model,
                prompt_tokens=prompt,
                new_tokens=new,
                created_at=moment_of(start_s),
            )
            start_of_run = start_s
        run.source += report
        run.repetitions.append(metrics)
    if run is not None:
        yield run


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
    if match is not None and name.endswith("time") and unit:
        return {}  # a phase that was too short for a rate has only its duration
    raise UnreadableError(number, f"{name} is {text.strip()[:40]!r}, no figure with a unit")
