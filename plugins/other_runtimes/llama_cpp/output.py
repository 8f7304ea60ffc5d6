"""Readers of llama.cpp's output: tests of llama-bench, timings, chunks of llama-perplexity.

Source: https://github.com/ggml-org/llama.cpp (MIT), `tools/llama-bench/README.md` ("Output
formats"), `tools/completion/README.md` and `tools/perplexity/README.md`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from harness.errors import RuntimeOutputError
from harness.results.records import JsonScalar
from harness.runtimes.json_values import UNREADABLE, Entry, is_scalar, number, reason_of

_FACTS = frozenset(
    (
        "avg_ns", "avg_ts", "stddev_ns", "stddev_ts", "samples_ns", "samples_ts", "test_time",
        "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename",
        "model_type", "model_size", "model_n_params", "n_prompt", "n_gen", "n_depth", "test",
    )
)  # fmt: skip
"""Fields with a place of their own; all others are settings."""


@dataclass(frozen=True, slots=True)
class LlamaBenchTest:
    """One test of llama-bench: prompt processing, text generation, or both.

    Attributes:
        prompt, generated: tokens that its speed is of.
        depth: tokens in the context before them.
        speeds: tokens/s of each repetition; the mean alone where the format has no more.
        filename: of the model; None where the format has none.
        kind: of the model: `llama 1B Q4_0`; must be there if `filename` is not.
        computed_by: processors, and backends in brackets: `SM8750 (CPU+HTP)`.
        build: commit and number of llama.cpp's build; empty where they are unknown.
        settings: all other scalars: `n_threads`, `n_gpu_layers`.
    """

    prompt: int
    generated: int
    depth: int
    speeds: tuple[float, ...]
    filename: str | None
    kind: str
    size_bytes: int | None
    parameters: int | None
    computed_by: str
    build: str
    settings: Mapping[str, JsonScalar]

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Read an object of `-o json`, or a row of another form under the same names.

        Raises:
            KeyError, ValueError: a field is missing, or of another type.
        """
        prompt, generated, depth = (_count(entry, f"n_{key}") for key in ("prompt", "gen", "depth"))
        speeds = entry.get("samples_ts", [entry.get("avg_ts")])
        if not isinstance(speeds, list) or not speeds:
            raise ValueError("samples_ts is not a list of numbers")
        commit, filename = entry.get("build_commit"), entry.get("model_filename")
        return cls(
            prompt=prompt,
            generated=generated,
            depth=depth,
            speeds=tuple(map(number, speeds)),
            filename=None if filename is None else str(filename),
            kind=str(entry["model_type"] if filename is None else entry.get("model_type", "")),
            size_bytes=_count(entry, "model_size") or None,
            parameters=_count(entry, "model_n_params") or None,
            computed_by=_computed_by(entry),
            build=f"{commit} ({entry.get('build_number')})" if commit else "",
            settings={k: v for k, v in entry.items() if k not in _FACTS and is_scalar(v)},
        )

    @property
    def metric(self) -> str:
        """The metric that its speeds are."""
        if self.prompt and self.generated:
            return "total_tokens_per_s"
        return "decode_tokens_per_s" if self.generated else "prefill_tokens_per_s"


def _computed_by(entry: Entry) -> str:
    parts = (str(entry.get(key) or "").strip() for key in ("cpu_info", "gpu_info"))
    processors = ", ".join(filter(None, parts))
    backends = "+".join(str(entry.get("backends") or "").split(","))
    return f"{processors} ({backends})" if processors and backends else processors or backends


def _count(entry: Entry, key: str) -> int:
    value = entry.get(key, 0) if key == "n_depth" else entry[key]  # older versions have no depth
    if value is None and key.startswith("model"):  # qnnfarm's own rows may not know it
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} is {str(value)[:40]!r}, no number of things")
    return value


def parse_bench(text: str, device: str) -> tuple[LlamaBenchTest, str]:
    """Return the one test that `llama-bench -o jsonl` printed, and its line."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if len(lines) != 1:
        raise RuntimeOutputError(device, f"llama-bench printed {len(lines)} tests")
    try:
        return LlamaBenchTest.of(json.loads(lines[0])), lines[0]
    except UNREADABLE as error:
        reason = f"unreadable result of llama-bench: {reason_of(error)}"
        raise RuntimeOutputError(device, reason) from error


_MS = r"= *([0-9]{1,12}(?:\.[0-9]{1,6})?) ms"
_LOAD = re.compile(rf"load time {_MS}")
_PROMPT = re.compile(rf"prompt eval time {_MS} / *([0-9]{{1,9}}) tokens")
_EVAL = re.compile(rf"(?<!prompt )\beval time {_MS} / *([0-9]{{1,9}}) (runs|tokens)")
_TOTAL = re.compile(rf"total time {_MS}")
_SPEEDS = re.compile(r"\[ Prompt: ([0-9.]{1,12}) t/s \| Generation: ([0-9.]{1,12}) t/s \]")


def timings_of(log: str) -> dict[str, float]:
    """Return the metrics of timings, by whatever program of llama.cpp; 0 was not measured."""
    metrics: dict[str, float] = {}
    if (match := _LOAD.search(log)) is not None:
        metrics["init_s"] = float(match[1]) / 1000
    if (match := _PROMPT.search(log)) is not None:
        prefill_s, tokens = float(match[1]) / 1000, int(match[2])
        metrics["prompt_tokens"], metrics["ttft_s"] = float(tokens), prefill_s
        metrics["prefill_tokens_per_s"] = tokens / prefill_s if prefill_s else 0.0
    if (match := _EVAL.search(log)) is not None:
        decode_s = float(match[1]) / 1000
        steps = int(match[2]) if decode_s else 0  # it prints 1 for none
        first = match[3] == "runs"  # which comes with the prompt; the server counts it
        metrics["generated_tokens"] = float(steps + first)
        metrics["decode_tokens_per_s"] = steps / decode_s if decode_s else 0.0
    if (match := _TOTAL.search(log)) is not None:
        metrics["elapsed_s"] = float(match[1]) / 1000
    if (match := _SPEEDS.search(log)) is not None:
        metrics["prefill_tokens_per_s"], metrics["decode_tokens_per_s"] = map(float, match.groups())
    return metrics


def parse_timings(log: str) -> dict[str, float] | None:
    """Return the metrics of the timings that llama-completion logs last.

    They come after the answer and through the same queue, so that an answer without them may lack
    its end: None then.
    """
    metrics = timings_of(log)
    if not metrics.keys() >= {"ttft_s", "generated_tokens", "elapsed_s"}:
        return None
    return {key: value for key, value in metrics.items() if value and key != "init_s"}


_CHUNK = re.compile(r"\[([0-9]{1,9})\]([0-9.]{1,30}),")


def parse_chunks(text: str, scored: Sequence[int], device: str) -> tuple[float, ...]:
    """Return the perplexity of each chunk of llama-perplexity.

    It prints the perplexity of all chunks so far, with four decimals.

    Args:
        scored: number of tokens that each chunk scores.
    """
    chunks = [(int(number), float(value)) for number, value in _CHUNK.findall(text)]
    if [number for number, _ in chunks] != list(range(1, len(scored) + 1)):
        reason = f"llama-perplexity scored {len(chunks)} windows, not {len(scored)}"
        raise RuntimeOutputError(device, reason)
    perplexities, loss, tokens = [], 0.0, 0
    for (_, value), count in zip(chunks, scored, strict=True):
        if not 1 <= value < math.inf:
            reason = f"llama-perplexity printed a perplexity of {value}"
            raise RuntimeOutputError(device, reason)
        tokens += count
        before, loss = loss, math.log(value) * tokens
        perplexities.append(math.exp(max(0.0, loss - before) / count))
    return tuple(perplexities)
