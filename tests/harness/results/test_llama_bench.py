"""Runs in llama-bench's words."""

import csv
import io
import json

import pytest

from harness.results.llama_bench import format_records, list_tests, to_record
from harness.results.metrics import Measurement
from harness.results.records import Run
from tests.harness.results.places import make_run


def benchmark(prompt: int, generated: int, session: int = 0) -> Run:
    """A session of two repetitions; the first token takes half a second."""
    values = {
        "prefill_tokens_per_s": (100.0, 104.0),
        "decode_tokens_per_s": (10.0, 12.0) if generated > 1 else (),
        "ttft_s": (0.5, 0.5),
        "prompt_tokens": (float(prompt),) * 2,
        "generated_tokens": (float(generated),) * 2,
    }
    run = make_run(session=session, labels={"team": "ca|mera"})
    work = run.workload.model_copy(update={"prompt_tokens": prompt, "max_new_tokens": generated})
    size = {"size_bytes": 5 << 20, "parameters": 1_200_000_000, "precision": "W8A16"}
    measured = tuple(
        Measurement(metric=key, value=value, repetition=number)
        for key, series in values.items()
        for number, value in enumerate(series)
    )
    container = run.container.model_copy(update=size)
    return run.model_copy(
        update={"workload": work, "container": container, "measurements": measured}
    )


@pytest.mark.parametrize(
    ("prompt", "generated", "together", "names"),
    [
        (64, 16, False, ["pp64", "tg16 @ d64"]),
        (64, 16, True, ["pp64", "tg16 @ d64", "pp64+tg16"]),
        (64, 1, True, ["pp64"]),
        (2, 16, True, ["tg16"]),
    ],
)
def test_one_run_is_several_of_its_tests(
    prompt: int, generated: int, together: bool, names: list[str]
) -> None:
    tests = list_tests([benchmark(prompt, generated)], together=together)
    assert [test.name for test in tests] == names


def test_the_speed_of_both_counts_all_tokens_and_all_time() -> None:
    *_, both = list_tests([benchmark(64, 16)], together=True)
    assert both.sessions == ((80 / (0.5 + 15 / 10), 80 / (0.5 + 15 / 12)),)


def test_records_have_its_keys_and_several_sessions() -> None:
    sessions = [benchmark(64, 16, number) for number in range(2)]
    prompt, _ = (to_record(test, sessions) for test in list_tests(sessions))
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_depth"]) == (64, 0, 0)
    assert prompt["samples_ts"] == [100.0, 104.0, 100.0, 104.0]
    assert prompt["samples_ns"] == [640_000_000, 615_384_615] * 2
    assert prompt["avg_ts"] == 102.0
    assert prompt["model_type"] == "tiny_llama W8A16"
    assert prompt["runs"] == [run.id for run in sessions]


def test_formats() -> None:
    sessions = [benchmark(64, 16)]
    records = [to_record(test, sessions) for test in list_tests(sessions)]
    heading, rule, first, second = format_records(records, "md").splitlines()
    assert [cell.strip() for cell in heading.split("|")[1:-1]] == [
        "model", "size", "params", "backend", "AR", "CL", "labels", "test", "t/s",
    ]  # fmt: skip
    assert rule.endswith(":|")
    assert [cell.strip() for cell in first.split("|")[1:-1]][-3:] == [
        "team=ca/mera", "pp64", "102.00 ± 2.83",
    ]  # fmt: skip
    assert "1.20 B" in first
    assert "5.00 MiB" in first
    assert "tg16 @ d64" in second
    assert json.loads(format_records(records, "json")) == records
    assert [json.loads(line) for line in format_records(records, "jsonl").splitlines()] == records
    rows = list(csv.DictReader(io.StringIO(format_records(records, "csv"))))
    assert [row["test"] for row in rows] == ["pp64", "tg16 @ d64"]
    assert rows[0]["avg_ts"] == "102.0"
    assert "samples_ts" not in rows[0]
