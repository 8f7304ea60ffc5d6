"""Readers of JSON: llama-bench, Genie's profile, AI Hub's profile.

Sources:
    llama-bench: https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench, "Output
        formats": `-o json` prints an array, `-o jsonl` an object a line, of the same objects.
    Genie: "Genie Profile" in the Genie documentation, docs.qualcomm.com 80-63442-10.
    AI Hub: `ProfileJob.download_profile` of the qai-hub client,
        https://workbench.aihub.qualcomm.com/docs; times are in microseconds, memory in bytes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from harness.errors import RuntimeOutputError
from harness.importing.records import ForeignRun, UnreadableError
from harness.runtimes.genie_profile import parse_profile

Entry = Mapping[str, Any]
_UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
_BENCH_FACTS = frozenset(
    (
        "avg_ns", "avg_ts", "stddev_ns", "stddev_ts", "samples_ns", "samples_ts", "test_time",
        "build_commit", "build_number", "cpu_info", "gpu_info", "model_filename", "model_size",
        "model_n_params", "n_prompt", "n_gen", "n_depth",
    )
)  # fmt: skip
"""Fields of llama-bench with a place of their own; all others are settings."""


def read_entries(text: str) -> Iterator[tuple[int, Entry]]:
    """Read the objects of an array, of lines, or the only one, each with its first line.

    Raises:
        UnreadableError: names the line, when the reader comes to it.
    """
    decoder = json.JSONDecoder()
    position, in_array = _skip(text, 0, ""), False
    if text.startswith("[", position):
        position, in_array = _skip(text, position + 1, ""), True
    while position < len(text) and not (in_array and text[position] == "]"):
        line = text.count("\n", 0, position) + 1
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise UnreadableError(error.lineno, f"it is no JSON: {error.msg}") from error
        except RecursionError as error:
            raise UnreadableError(line, "it is nested too deep") from error
        if not isinstance(entry, dict):
            raise UnreadableError(line, "it is not an object")
        yield line, entry
        position = _skip(text, position, "," if in_array else "")
    if in_array and position >= len(text):
        raise UnreadableError(text.count("\n") + 1, "the array does not end: the file is cut off")


def _skip(text: str, position: int, separator: str) -> int:
    while position < len(text) and (text[position].isspace() or text[position] in separator):
        position += 1
    return position


def read_llama_bench(line: int, entry: Entry) -> ForeignRun:
    """Read one test of llama-bench: prompt processing, text generation, or both.

    Raises:
        UnreadableError: a field is missing or of another type.
    """
    try:
        prompt, new, depth = (_count(entry, key) for key in ("n_prompt", "n_gen", "n_depth"))
        speeds = [_number(value) for value in _list(entry, "samples_ts")]
        metric = "decode_tokens_per_s" if new else "prefill_tokens_per_s"
        metric = "total_tokens_per_s" if prompt and new else metric
        cpu, gpu = str(entry.get("cpu_info", "")), str(entry.get("gpu_info", ""))
        return ForeignRun(
            line,
            "llama-bench",
            model=PurePosixPath(str(entry["model_filename"])).stem,
            prompt_tokens=prompt,
            depth_tokens=depth,
            new_tokens=new,
            device_model=", ".join(filter(None, (cpu, gpu))) or None,
            container_bytes=_count(entry, "model_size"),
            parameters=_count(entry, "model_n_params"),
            created_at=_moment(entry["test_time"]),
            settings={
                key: value
                for key, value in entry.items()
                if key not in _BENCH_FACTS and isinstance(value, str | int | float | bool)
            },
            versions={"llama.cpp": f"{entry['build_commit']} ({entry['build_number']})"},
            repetitions=[{metric: speed} for speed in speeds],
        )
    except _UNREADABLE as error:
        raise UnreadableError(line, _reason(error)) from error


def read_genie_profile(line: int, entry: Entry) -> ForeignRun:
    """Read the profile of one query, as `genie-t2t-run --profile` writes it.

    Raises:
        UnreadableError: a figure is missing, or has no known unit.
    """
    try:
        metrics = parse_profile(json.dumps(entry), "")
    except RuntimeOutputError as error:
        raise UnreadableError(line, error.reason) from error
    prompt = int(metrics["prompt_tokens"])
    return ForeignRun(line, "genie-t2t-run", prompt_tokens=prompt, repetitions=[metrics])


def read_ai_hub_profile(line: int, entry: Entry) -> ForeignRun:
    """Read the profile of an AI Hub job: times of one call of the model, and memory.

    Raises:
        UnreadableError: a figure is missing or of another type.
    """
    try:
        summary = entry["execution_summary"]
        times = summary.get("all_inference_times") or [summary["estimated_inference_time"]]
        once = {
            "first_load_s": ("first_load_time", 1e-6),
            "init_s": ("warm_load_time", 1e-6),
            "inference_peak_bytes": ("estimated_inference_peak_memory", 1.0),
        }
        units = Counter(str(each["compute_unit"]) for each in entry.get("execution_detail", ()))
        return ForeignRun(
            line,
            "AI Hub",
            settings={f"layers on {unit}": count for unit, count in sorted(units.items())},
            repetitions=[{"inference_s": _number(each) * 1e-6} for each in times],
            session={
                metric: _number(summary[key]) * scale
                for metric, (key, scale) in once.items()
                if summary.get(key) is not None
            },
        )
    except _UNREADABLE as error:
        raise UnreadableError(line, _reason(error)) from error


def _reason(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _list(entry: Entry, key: str) -> Sequence[object]:
    values = entry[key]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{key} is not a list of numbers")
    return values


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def _count(entry: Entry, key: str) -> int:
    value = entry.get(key, 0) if key == "n_depth" else entry[key]  # older versions have no depth
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} is {str(value)[:40]!r}, no number of things")
    return value


def _moment(text: object) -> datetime:
    moment = datetime.fromisoformat(str(text))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
