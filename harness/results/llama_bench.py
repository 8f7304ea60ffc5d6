"""Results in llama-bench's words: its tests, its columns, its output formats.

Names and keys are those of llama.cpp's `tools/llama-bench` (README.md and llama-bench.cpp): `pp64`
is a prompt of 64 tokens, `tg16` 16 generated tokens, `@ d64` means after 64 tokens in the context,
and `pp64+tg16` is the speed of both together. One run of ours measures the first two at once: its
prompt at depth 0, and its generation at the depth of its prompt. Keys that llama-bench does not
have come after its own.
"""

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.results.identity import SHORTEST_PROMPT, Subject, container_name
from harness.results.metrics import Stats, summarise
from harness.results.records import Run
from harness.words import csv_cell

OutputFormat = Literal["md", "csv", "json", "jsonl"]
_GIB, _MIB, _GIGA, _MEGA = 2.0**30, 2.0**20, 1e9, 1e6
_NS = 1e9
_LEFT = frozenset({"model", "backend", "device", "labels"})


@dataclass(frozen=True, slots=True)
class Test:
    """One test in llama-bench's words.

    Attributes:
        prompt, generated: tokens that its speed is of.
        depth: tokens in the context before them.
        sessions: tokens/s of the repetitions of each session.
    """

    prompt: int
    generated: int
    depth: int
    sessions: tuple[tuple[float, ...], ...]

    @property
    def name(self) -> str:
        """As llama-bench names it: `tg16 @ d64`."""
        parts = [f"pp{self.prompt}"] * bool(self.prompt) + [f"tg{self.generated}"] * bool(
            self.generated
        )
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def stats(self) -> Stats | None:
        """Mean and spread in tokens/s; None without a repetition."""
        return summarise(self.sessions)


def list_tests(sessions: Sequence[Run], *, together: bool = False) -> list[Test]:
    """List the tests that the sessions of one benchmark are.

    Args:
        together: also the speed of prompt and generation together, llama-bench's `-pg`.
    """
    work = sessions[0].workload
    prompt, generated = work.prompt_tokens or 0, work.max_new_tokens or 0
    prompt = prompt if prompt > SHORTEST_PROMPT else 0
    generated = generated if generated > 1 else 0  # the first token comes with the prompt
    depth = work.depth_tokens or 0
    tests = []
    if prompt:
        speeds = tuple(run.values("prefill_tokens_per_s") for run in sessions)
        tests.append(Test(prompt, 0, depth, speeds))
    if generated:
        speeds = tuple(run.values("decode_tokens_per_s") for run in sessions)
        tests.append(Test(0, generated, depth + prompt, speeds))
    if together and prompt and generated:
        tests.append(Test(prompt, generated, depth, tuple(map(_speed_of_both, sessions))))
    return [test for test in tests if test.stats is not None]


def _speed_of_both(run: Run) -> tuple[float, ...]:
    """Compute tokens/s of prompt and generation together, by repetition.

    The first token comes with the prompt; the decode rate is that of the others.
    """
    keys = ("prompt_tokens", "generated_tokens", "ttft_s", "decode_tokens_per_s")
    columns = [run.values(key) for key in keys]
    if len(set(map(len, columns))) > 1:  # a repetition ended with its first token
        return ()
    return tuple(
        (prompt + generated) / (first + (generated - 1) / rate)
        for prompt, generated, first, rate in zip(*columns, strict=True)
    )


def to_record(test: Test, sessions: Sequence[Run]) -> dict[str, object]:
    """Convert a test to llama-bench's keys, with ours after them."""
    last = sessions[-1]
    container, device = last.container, last.device
    tokens = test.prompt + test.generated
    samples = [value for values in test.sessions for value in values]
    times = [round(tokens / value * _NS) for value in samples]
    stats = test.stats
    return {
        "build_commit": last.provenance.git_commit,
        "build_number": None,
        "backends": backend(last),
        "model_filename": container.sha256,
        "model_type": container_name(container),
        "model_size": container.size_bytes,
        "model_n_params": container.parameters,
        "n_batch": max(container.ars, default=None),
        "n_prompt": test.prompt,
        "n_gen": test.generated,
        "n_depth": test.depth,
        "test_time": last.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(times)) if times else None,
        "stddev_ns": round(statistics.stdev(times)) if len(times) > 1 else 0,
        "avg_ts": stats.mean if stats else None,
        "stddev_ts": stats.sd or 0.0 if stats else None,
        "samples_ns": times,
        "samples_ts": samples,
        "test": test.name,
        "precision": container.precision,
        "ars": list(container.ars),
        "cl": container.cl,
        "soc": device.soc,
        "emulator": device.emulator,
        "devices": list(dict.fromkeys(run.device.serial for run in sessions)),
        "output_check": last.check.outcome,
        "labels": dict(last.labels),
        "group_id": last.group_id,
        "runs": [run.id for run in sessions],
    }


def backend(run: Run) -> str:
    """Name the backend: `HTP v79`, `HTP v79 (emulator)`, with a runtime other than Genie."""
    if not run.container.target and run.origin is None:  # no container: its runtime chose
        return run.workload.runtime
    name = f"HTP {run.device.dsp_arch or ''}".rstrip()
    name = f"{name} (emulator)" if run.device.emulator else name
    return f"{name} {Subject.of(run).by}".rstrip()


def format_records(records: Sequence[Mapping[str, Any]], output: OutputFormat) -> str:
    """Format records as llama-bench prints them, without the last line's end."""
    if output == "json":
        return json.dumps(records, indent=2, ensure_ascii=False)
    if output == "jsonl":
        return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    if output == "csv":
        return _csv(records)
    several = len({tuple(record["devices"]) for record in records}) > 1
    labels = any(record["labels"] for record in records)
    names = ["model", "size", "params", "backend", "AR", "CL"]
    names += ["device"] * several + ["labels"] * labels + ["test", "t/s"]
    return "\n".join(markdown(names, [_cells(record, names) for record in records]))


def _cells(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    spread = record["stddev_ts"] if len(record["samples_ts"]) > 1 else None
    cells = {
        "model": record["model_type"],
        "size": format_size(record["model_size"]),
        "params": format_parameters(record["model_n_params"]),
        "backend": record["backends"],
        "AR": ",".join(map(str, record["ars"])),
        "CL": str(record["cl"]),
        "device": ", ".join(record["devices"]),
        "labels": ", ".join(f"{key}={value}" for key, value in record["labels"].items()),
        "test": record["test"],
        "t/s": f"{record['avg_ts']:.2f}" + ("" if spread is None else f" ± {spread:.2f}"),
    }
    return [cells[name] for name in names]


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with every value quoted and no samples, as llama-bench writes it."""
    keys = [key for key in records[0] if not key.startswith("samples_")] if records else []
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(keys)
    for record in records:
        writer.writerow([_plain(record[key]) for key in keys])
    return text.getvalue().rstrip("\n")


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return csv_cell(value)


def format_size(size_bytes: object) -> str:
    """Format a size as llama-bench does: `1.10 GiB`; `?` if it is unknown."""
    if not isinstance(size_bytes, int):
        return "?"
    return f"{size_bytes / _GIB:.2f} GiB" if size_bytes >= _GIB else f"{size_bytes / _MIB:.2f} MiB"


def format_parameters(count: object) -> str:
    """Format a number of weights as llama-bench does: `1.24 B`; `?` if it is unknown."""
    if not isinstance(count, int):
        return "?"
    return f"{count / _GIGA:.2f} B" if count >= _GIGA else f"{count / _MEGA:.2f} M"


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a markdown table whose columns are aligned as in llama-bench's."""
    clean = [tuple(" ".join(cell.replace("|", "/").split()) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *clean, strict=True)]
    at_left = [name in _LEFT for name in names]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, at_left, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width + 2) if is_left else "-" * (width + 1) + ":"
        for width, is_left in zip(widths, at_left, strict=True)
    ]
    return [line(names), f"|{'|'.join(rule)}|", *map(line, clean)]
