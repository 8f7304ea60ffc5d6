"""Readers of what ExecuTorch's runners, inspector and benchmark app print and write.

Sources:
    `qnn_llama_runner`: see `plugins.other_runtimes.executorch.runtime`; as in pull request 7175.
    ETDump: "Inspector APIs", https://docs.pytorch.org/executorch/stable/model-inspector.html
        (`print_data_tabular`, `save_data_to_tsv`); and `qnn_executor_runner`'s "N inference took".
    Benchmarks: https://github.com/pytorch/executorch, `extension/benchmark`: what the app writes
        (`BenchmarkMetric`), and the same as records of PyTorch's benchmark database
        (`.github/scripts/extract_benchmark_results.py`).
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import PurePosixPath

from harness.importing.json_files import canonical, moment_of, read_entries
from harness.importing.logs import NUMBER, log_lines
from harness.importing.records import FileFormat, ForeignRun, UnreadableError
from harness.runtimes import json_values
from harness.runtimes.json_values import UNREADABLE, Entry, reason_of
from plugins.other_runtimes.executorch.runtime import OBSERVER, parse_report
from plugins.other_runtimes.log_queries import LogQuery, count_of, query_of

_MODEL_PATH = re.compile(r"model_path=([^\s,]{1,1000})")
_RUNNER = re.compile(r"executorch:(qnn_[a-z0-9_]{1,60}_runner)\.cpp")
_COUNTS = re.compile(r"Prompt Tokens:\s*([0-9]{1,9})\s+Generated Tokens:\s*([0-9]{1,9})")
_SPAN = re.compile(
    r"(Model Load Time|Total inference time|Prompt evaluation|Generated (?=[0-9]+ tokens:)"
    rf"|Time to first generated token)[^:]*:\s*{NUMBER} \(seconds\)(?:\s*Rate:\s*{NUMBER} )?"
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
    queries: list[LogQuery] = []
    process = {"number": "", "model": "", "runner": "qnn_llama_runner"}
    for number, line in enumerate(log_lines(text), 1):
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
        query = query_of(queries, number, process, prompt, told)
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
            prompt_tokens=count_of(first, "prompt_tokens"),
            new_tokens=count_of(first, "generated_tokens"),
            created_at=moment_of(first.began_s),
            repetitions=[query.figures for query in same],
        )


def _printed(line: str) -> dict[str, float]:
    """Return the figures of a line of `print_report`."""
    if (match := _COUNTS.search(line)) is not None:
        return {"prompt_tokens": float(match[1]), "generated_tokens": float(match[2])}
    if (match := _SPAN.search(line)) is not None:
        metric, place = _SPANS[match[1]]
        return {} if match[place] is None else {metric: float(match[place])}
    return {}


_LENGTHS = {"prompt_tokens", "generated_tokens"}
_CELL = re.compile(r"[│|\t]|\s{2,}")
_AVERAGE = re.compile(r"avg \((s|ms|us|ns)\)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_EVENTS = {
    "Method::execute": "inference_s",
    "Method::init": "init_s",
    "Program::load_method": "init_s",
}
_TOOK = re.compile(rf"([0-9]{{1,9}}) inference took {NUMBER} ms, avg {NUMBER} ms")


def read_etdump(text: str) -> Iterator[ForeignRun]:
    """Read what the inspector prints or saves of ETDumps, or `qnn_executor_runner` of its calls.

    Each table is a run. It has averages over all calls; other rows (operators, delegates in cycles)
    are left out.
    """
    run = ForeignRun(1, "qnn_executor_runner", source="")
    columns: list[str] = []
    for number, line in enumerate(log_lines(text), 1):
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
            match = re.fullmatch(NUMBER, cells[place + shift])
            if match is None:
                raise UnreadableError(number, f"{cells[place + shift][:40]!r} is no average time")
            return float(match[1]) * _SECONDS[unit[1]]
    raise UnreadableError(number, "the table has no column avg with a unit of time")


_EXECUTORCH = {
    "avg_inference_latency(ms)": ("inference_s", 1e-3),
    "model_load_time(ms)": ("init_s", 1e-3),
    "llm_model_load_time(ms)": ("init_s", 1e-3),
    "generate_time(ms)": ("elapsed_s", 1e-3),
    "token_per_sec": ("decode_tokens_per_s", 1.0),
    "peak_inference_mem_usage(mb)": ("inference_peak_bytes", 2.0**20),
}


def read_executorch_benchmark(text: str) -> Iterator[ForeignRun | UnreadableError]:
    """Read figures of ExecuTorch's benchmark app: those of one model on one device are a run."""
    runs: dict[tuple[object, ...], ForeignRun] = {}
    failures = set[tuple[object, ...]]()
    for item in read_entries(text):
        if isinstance(item, UnreadableError):
            yield item
            continue
        line, entry = item
        try:
            by_app = "benchmarkModel" in entry
            run, name, values = _app_figure(*item) if by_app else _database_figure(*item)
            key = (
                run.model,
                run.precision,
                run.device_model,
                run.created_at,
                *run.versions.values(),
            )
            if name == "FAILURE_REPORT" or (name == "load_status" and any(values)):
                failures.add(key)
                raise ValueError("the job failed, it has no figures")
            run = runs.setdefault(key, run)
            run.source += canonical(entry)
            if name in _EXECUTORCH:
                metric, scale = _EXECUTORCH[name]
                if metric in {"init_s", "inference_peak_bytes"}:
                    run.session[metric] = values[0] * scale
                    continue
                run.repetitions += [{} for _ in values[len(run.repetitions) :]]
                for repetition, value in zip(run.repetitions, values, strict=False):
                    repetition[metric] = value * scale
        except UNREADABLE as error:
            yield UnreadableError(line, reason_of(error))
    yield from (run for key, run in runs.items() if key not in failures)


def _app_figure(line: int, entry: Entry) -> tuple[ForeignRun, str, list[float]]:
    model, device = entry["benchmarkModel"], entry["deviceInfo"]
    kind = " ".join((str(device["device"]), str(device["arch"])))
    names = (kind, device["os"], model.get("backend"))
    run = ForeignRun(
        line,
        "ExecuTorch benchmark",
        source="",
        model=str(model["name"]),
        precision=model.get("quantization") or None,
        device_model=", ".join(str(name) for name in names if name),
    )
    return run, str(entry["metric"]), [json_values.number(entry["actualValue"])]


def _database_figure(line: int, entry: Entry) -> tuple[ForeignRun, str, list[float]]:
    model, metric = entry["model"], entry["metric"]
    runner = next(iter(entry.get("runners") or [{}]))
    names = (runner.get("name"), runner.get("type"), model.get("backend"))
    commit = entry.get("head_sha")
    run = ForeignRun(
        line,
        "ExecuTorch benchmark",
        source="",
        model=str(model["name"]),
        device_model=", ".join(str(name) for name in names if name) or None,
        created_at=moment_of(float(entry.get("timestamp") or 0)),
        versions={"executorch": str(commit)} if commit else {},
    )
    values = metric["benchmark_values"]
    return (
        run,
        str(metric["name"]),
        [json_values.number(v) for v in (values if isinstance(values, list) else [values])],
    )


def read_dump(text: str) -> Iterator[ForeignRun | UnreadableError]:
    """Refuse an ETDump itself, a FlatBuffers file."""
    del text
    reason = "it is an ETDump itself: import what executorch.devtools.Inspector prints of it"
    yield UnreadableError(1, reason)


EXECUTORCH = (
    FileFormat('"benchmarkModel"|"benchmark_values"', read_executorch_benchmark),
    FileFormat(r"PyTorchObserver |\(tokens/second\)", read_executorch, "log"),
)
ETDUMP = (
    FileFormat("event_block_name| inference took ", read_etdump, "log"),
    FileFormat(r"\A.{0,12}ED00", read_dump, "log"),
)
