"""Readers of what mllm's runners and its benchmark print.

Source: https://github.com/UbiquitousLearning/mllm, `tools/mllm-llm-benchmark` (its README, and
`--output_csv`), `mllm/models/ARGeneration.cpp` (`perfSummary`), and version 1's demo of Qwen on the
NPU.
"""

import re
from collections.abc import Iterator, Mapping

from harness.importing.csv_files import read_rows
from harness.importing.json_files import of_entries
from harness.importing.logs import NUMBER, log_lines
from harness.importing.records import Entries, FileFormat, ForeignRun, UnreadableError
from harness.runtimes.json_values import Entry

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
_VALUE = re.compile(rf"{NUMBER}\s*(ms|us|tokens/s)?\)?$")
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
    for number, each in enumerate(log_lines(text), 1):
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


FORMATS = (
    FileFormat("Prefill Speed|Performance Summary", read_mllm, "log"),
    FileFormat("^schema_version,git_commit,", of_entries(read_mllm_means, read_mllm_csv)),
)
