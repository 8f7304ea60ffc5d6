"""geniex-bench, the benchmark of GenieX: llama.cpp and QAIRT behind one C API.

Source: https://github.com/qualcomm/GenieX (BSD-3-Clause), `sdk/benchmark/README.md` and its
`--help`; the report of a cell is schema 2 to 6, which differ in what they add.
"""

from collections.abc import Mapping
from types import MappingProxyType

from harness.runtimes.json_values import Entry, number

_METRICS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "ttft_s": ("ttft_us", 1e-6),
        "prefill_tokens_per_s": ("prefill_tps", 1.0),
        "decode_tokens_per_s": ("decode_tps", 1.0),
        "prompt_tokens": ("prompt_tokens", 1.0),
        "generated_tokens": ("gen_tokens", 1.0),
    }
)


def figures_of(run: Entry) -> dict[str, float]:
    """Return the metrics of one of a cell's `runs`.

    Raises:
        KeyError, ValueError: a figure is missing, or is no number.
    """
    return {
        metric: number(run[key]) * scale
        for metric, (key, scale) in _METRICS.items()
        if run[key] or metric == "generated_tokens"  # 0: there was no such phase
    }
