"""Output of llama.cpp's programs: read, or refused in one line.

The texts are what version 0.7.0 of Debian printed.
"""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import RuntimeOutputError
from harness.runtimes.description import read_description
from plugins.other_runtimes.llama_cpp.output import (
    parse_bench,
    parse_chunks,
    parse_timings,
    timings_of,
)
from plugins.other_runtimes.llama_cpp.runtime import LlamaCppDescription

TIMINGS = """\
0.00.213.811 I common_perf_print:        load time =     102.92 ms
0.00.213.812 I common_perf_print: prompt eval time =     102.79 ms /     7 tokens (   14.68 ms)
0.00.213.813 I common_perf_print:        eval time =      13.75 ms /    23 runs   (    0.60 ms)
0.00.213.814 I common_perf_print:       total time =     117.23 ms /    30 tokens
"""
OLDER = """\
llama_perf_context_print: prompt eval time =      80.76 ms /    11 tokens (    7.34 ms per token)
llama_perf_context_print:        eval time =    9210.59 ms /   475 runs   (   19.39 ms per token)
llama_perf_context_print:       total time =    9454.92 ms /   486 tokens
"""


@pytest.mark.parametrize(
    ("log", "tokens", "prefill", "decode", "ttft_s"),
    [(TIMINGS, (7, 24), 68.10, 1672.7, 0.10279), (OLDER, (11, 476), 136.21, 51.57, 0.08076)],
)
def test_timings_of_an_answer(
    log: str, tokens: tuple[int, int], prefill: float, decode: float, ttft_s: float
) -> None:
    """The older ones are of the README of its backend for Snapdragon."""
    metrics = parse_timings(log)
    assert metrics is not None
    assert (metrics["prompt_tokens"], metrics["generated_tokens"]) == tokens
    assert metrics["prefill_tokens_per_s"] == pytest.approx(prefill, abs=0.01)
    assert metrics["decode_tokens_per_s"] == pytest.approx(decode, abs=0.1)
    assert metrics["ttft_s"] == pytest.approx(ttft_s)


def test_one_token_is_one_and_the_server_counts_them_all() -> None:
    """Of an answer of one token it prints one run, of 0 ms."""
    none = TIMINGS.replace("13.75 ms /    23 runs", "0.00 ms /     1 runs")
    metrics = parse_timings(none)
    assert metrics is not None
    assert metrics["generated_tokens"] == 1
    assert "decode_tokens_per_s" not in metrics
    assert timings_of("eval time =    2000.00 ms /    50 tokens")["generated_tokens"] == 50


@pytest.mark.parametrize("lines", range(4))
def test_timings_that_were_cut_off_are_none(lines: int) -> None:
    assert parse_timings("\n".join(TIMINGS.splitlines()[:lines])) is None


def test_chunks_are_printed_with_the_perplexity_of_all_so_far() -> None:
    printed = "0.00 minutes\n[1]15.5333,[2]16.4120,[3]18.3563,\n"
    one, two, three = parse_chunks(printed, [95, 95, 95], "phone")
    assert one == pytest.approx(15.5333)
    assert math.sqrt(one * two) == pytest.approx(16.4120)
    assert (one * two * three) ** (1 / 3) == pytest.approx(18.3563)


@pytest.mark.parametrize("printed", ["", "[1]15.5,", "[1]15.5,[3]16.1,", "[1]0.2,[2]16.4,"])
def test_other_chunks_than_were_asked_are_refused(printed: str) -> None:
    with pytest.raises(RuntimeOutputError, match="llama-perplexity"):
        parse_chunks(printed, [95, 95], "phone")


@given(st.text())
def test_whatever_is_printed_is_read_or_refused(text: str) -> None:
    with pytest.raises(RuntimeOutputError):
        parse_bench(text, "phone")
    with pytest.raises(RuntimeOutputError):
        parse_chunks(text, [4], "phone")
    parse_timings(text)


@pytest.mark.parametrize(
    "text", ["", "{}\n{}", '{"n_prompt": 1}', "{", '{"n_prompt": 1, "n_gen": -1, "n_depth": 0}']
)
def test_what_is_no_single_test_is_refused(text: str) -> None:
    with pytest.raises(RuntimeOutputError, match="llama-bench"):
        parse_bench(text, "phone")


@pytest.mark.parametrize("flag", ["on", "off", "auto", "'on'"])
def test_a_description_takes_options_as_the_programs_do(tmp_path: Path, flag: str) -> None:
    """YAML takes `on` for true, and 512 for a number."""
    file = tmp_path / "model.yaml"
    file.write_text(
        f"runtime: llama.cpp\nmodel: m.gguf\nbuild: bin\nflash_attn: {flag}\n"
        "arguments: [-b, 512]\nenvironment: {GGML_HEXAGON_NDEV: 2}\n"
    )
    description = read_description(file, LlamaCppDescription, "llama.cpp")
    assert description.flash_attn == flag.strip("'")
    assert description.arguments == ("-b", "512")
    assert description.environment == {"GGML_HEXAGON_NDEV": "2"}
