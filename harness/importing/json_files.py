"""Readers of JSON: profiles of Genie, results of geniex-bench and of ExecuTorch's apps.

Sources:
    Genie: "Genie Profile" in the Genie documentation, docs.qualcomm.com 80-63442-10.
    geniex-bench: see `harness.runtimes.geniex`.
    ExecuTorch: https://github.com/pytorch/executorch, `extension/benchmark`: what the app writes
        (`BenchmarkMetric`), and the same as records of PyTorch's benchmark database
        (`.github/scripts/extract_benchmark_results.py`).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import PureWindowsPath

from harness.importing.records import Entries, ForeignRun, UnreadableError
from harness.runtimes import geniex
from harness.runtimes.genie.output import REQUIRED, figures_of
from harness.runtimes.json_values import UNREADABLE, Entry, is_scalar, number, reason_of

Reader = Callable[[str], Iterator[ForeignRun | UnreadableError]]
"""Reads a file's text; it raises `UnreadableError` where it cannot go on."""

_MOST_FAULTS = 1000
"""Lines that cannot be read, after which the rest of a file is not looked at."""
_SPACE = re.compile(r"[\s,]*")
_ARRAY = re.compile(r"\[[ \t]*(?:\r?\n|[{\]]|\Z)")
_KEY = re.compile(r'"\w+"\s*:')
_NEXT_OBJECT = re.compile(r"^[\[{]", re.MULTILINE)


def of_entries(
    read: Callable[[int, Entry], Iterable[ForeignRun]],
    entries: Callable[[str], Entries] | None = None,
) -> Reader:
    """Make the reader of a file from that of one entry; of JSON, where nothing else is said."""

    def reader(text: str) -> Iterator[ForeignRun | UnreadableError]:
        for item in (entries or read_entries)(text):
            if isinstance(item, UnreadableError):
                yield item
                continue
            line, entry = item
            try:
                yield from read(line, entry)
            except UnreadableError as error:
                yield error
            except UNREADABLE as error:
                yield UnreadableError(line, reason_of(error))

    return reader


def read_entries(text: str) -> Entries:
    """Read all objects, each with its first line: of arrays, of lines, or the only one.

    Lines of no JSON between them, which the tool printed meanwhile, are left out.
    """
    decoder = json.JSONDecoder()
    position, line, counted_to, faults, in_array = 0, 1, 0, 0, False
    while (position := _SPACE.match(text, position).end()) < len(text):  # type: ignore[union-attr]
        line, counted_to = line + text.count("\n", counted_to, position), position
        fault = None
        if text[position] == "{":
            try:
                entry, position = decoder.raw_decode(text, position)
            except RecursionError:
                fault = UnreadableError(line, "it is nested too deep")
            except ValueError as error:
                at = getattr(error, "lineno", line)
                fault = UnreadableError(at, f"it is no JSON: {getattr(error, 'msg', error)}")
            else:
                yield line, entry
        elif text[position] == "]" or _ARRAY.match(text, position):
            in_array = text[position] == "["
            position += 1
        else:
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            if _KEY.search(text, position, end):
                fault = UnreadableError(line, "it is no JSON: it is not the beginning of an object")
            position = end
        if fault is not None:
            faults += 1
            if in_array or faults > _MOST_FAULTS:
                raise fault
            yield fault
            following = _NEXT_OBJECT.search(text, position + 1)
            position = following.start() if following else len(text)
    if in_array:
        raise UnreadableError(text.count("\n") + 1, "the array does not end: the file is cut off")


def read_genie_profile(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read each query of a profile, as `genie-t2t-run --profile` writes it.

    Figures of the dialog's creation belong to its first query. `start` and `stop` are microseconds
    since the device started, or since 1970.
    """
    has_query = False
    for component in entry["components"]:
        of_dialog: dict[str, float] = {}
        end = max((float(event.get("stop", 0)) for event in component["events"]), default=0.0)
        for event in component["events"]:
            try:
                figures = figures_of(event)
            except (TypeError, ValueError) as error:
                raise UnreadableError(line, f"unreadable Genie profile: {error}") from error
            if not figures.keys() - {"init_s"}:  # creation, or a query that filled the context
                of_dialog |= figures
                continue
            has_query = True
            if absent := REQUIRED - {"init_s"} - figures.keys():
                raise UnreadableError(line, f"a query lacks {', '.join(sorted(absent))}")
            if figures["generated_tokens"] < 2:  # no token came after the first
                figures.pop("decode_tokens_per_s", None)
            start = float(event.get("start", end))
            yield ForeignRun(
                line,
                "genie-t2t-run",
                source=canonical(event),
                prompt_tokens=int(figures["prompt_tokens"]),
                created_at=moment_of(start * 1e-6),
                before_end_s=max(0.0, end - start) * 1e-6,
                repetitions=[{**of_dialog, **figures}],
            )
            of_dialog = {}
    if not has_query:
        raise UnreadableError(line, "the Genie profile has no query with figures")


def read_geniex_bench(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read one cell of geniex-bench, a repetition for each of its runs."""
    path = PureWindowsPath(str(entry["model_path"]))
    params = {key: value for key, value in entry["params"].items() if is_scalar(value)}
    versions = {name: entry.get(f"{name}_version") for name in ("qairt", "llama_cpp")}
    yield ForeignRun(
        line,
        "geniex-bench",
        source=canonical(entry),
        model=path.stem if path.suffix == ".gguf" else path.name,
        device_model=f"{entry['device']} ({entry['plugin']})",
        container_bytes=int(number(entry.get("model_size_bytes") or 0)) or None,
        new_tokens=int(number(params.pop("n_gen"))),
        settings=params,
        versions={name: str(version) for name, version in versions.items() if version},
        labels={} if entry["cell_id"] == "cell" else {"cell": str(entry["cell_id"])},
        repetitions=[geniex.figures_of(run) for run in entry["runs"]],
    )


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
    return run, str(entry["metric"]), [number(entry["actualValue"])]


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
        [number(v) for v in (values if isinstance(values, list) else [values])],
    )


def canonical(entry: Entry) -> str:
    """Return the text of an object without its layout."""
    return json.dumps(entry, sort_keys=True, ensure_ascii=False)


def moment_of(seconds: float) -> datetime | None:
    """Return a time by a clock that counts from 1970; None for a clock that does not."""
    plausible = 1_262_304_000 < seconds < 4_102_444_800  # 2010 to 2100
    return datetime.fromtimestamp(seconds, UTC) if plausible else None
