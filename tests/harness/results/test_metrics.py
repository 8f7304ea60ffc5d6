"""The registry of metrics."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MetricError
from harness.results.metrics import (
    JUDGED_METRICS,
    METRICS,
    Direction,
    Measurement,
    Use,
    find_key,
    find_metric,
)
from tools.commands import MEASUREMENTS, measurements


def test_a_key_names_its_unit() -> None:
    for key, metric in METRICS.items():
        is_plain = metric.unit in {"", "nats"} or key.endswith("_error")
        assert is_plain == (metric.name == key)
    assert find_metric("decode_energy_j_per_token").name == "decode_energy"


def test_a_name_is_enough_for_a_key() -> None:
    assert find_key("ttft") == "ttft_s"
    assert find_key("decode") == "decode_tokens_per_s"
    assert find_key("decode_e", JUDGED_METRICS) == "decode_energy_j_per_token"
    with pytest.raises(MetricError, match="ttft_p50_s, ttft_p95_s"):
        find_key("ttft_p")


def test_what_judges_a_metric_knows_which_way_it_gets_better() -> None:
    for metric in METRICS.values():
        if metric.use & (Use.COMPARED | Use.GATED | Use.LEADING):
            assert Use.JUDGED in metric.use
        assert Use.JUDGED not in metric.use or metric.direction is not Direction.NEITHER


def test_a_gain_is_for_the_better() -> None:
    speed, latency = find_metric("decode_tokens_per_s"), find_metric("ttft_s")
    assert find_metric("generated_tokens").direction is Direction.NEITHER
    assert speed.gain(0.9) == pytest.approx(-0.1)
    assert latency.gain(0.9) == pytest.approx(0.1)


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(MetricError, match=r"'tokens/s'.*decode_tokens_per_s") as caught:
        Measurement(metric="tokens/s", value=1.0)
    assert caught.value.exit_code == 2


def test_impossible_values_are_refused() -> None:
    never = (math.nan, math.inf, -math.inf, -2.0, 1e300)
    for key, value in (
        *((key, value) for key in METRICS for value in never),
        ("decode_tokens_per_s", 0.0), ("ttft_s", 0.0), ("peak_rss_bytes", 0.0),
        ("peak_rss_bytes", 1.5), ("generated_tokens", 2.5), ("perplexity", 0.99),
        ("init_s", 86_401.0),
    ):  # fmt: skip
        with pytest.raises(MetricError, match=key) as caught:
            Measurement(metric=key, value=value)
        assert "\n" not in str(caught.value)


@given(st.sampled_from(sorted(METRICS)), st.floats())
def test_a_value_is_either_legal_or_a_typed_error(key: str, value: float) -> None:
    metric = METRICS[key]
    try:
        kept = metric.check(value)
    except MetricError:
        return
    assert kept == value
    assert metric.minimum <= kept <= metric.maximum
    assert metric.show(kept)


def test_values_as_people_read_them() -> None:
    for key, value, shown in (
        ("decode_tokens_per_s", 53.6449, "53.64 tokens/s"),
        ("prefill_tokens_per_s", 1234.6, "1,235 tokens/s"),
        ("ttft_s", 0.0371, "37.1 ms"),
        ("peak_rss_bytes", 2.0**30, "1,024 MiB"),
        ("perplexity", 29.6449, "29.645"),
        ("generated_tokens", 16.0, "16 tokens"),
    ):
        assert find_metric(key).show(value) == shown
    # A deviation has the decimals of its mean.
    assert find_metric("prefill_tokens_per_s").format(3.1416, beside=1512.0) == "3"
    assert find_metric("prefill_tokens_per_s").format(3.1416, beside=121.0) == "3.1"


def test_the_document_has_the_metrics_as_they_are_declared() -> None:
    """`python -m tools.commands` writes it."""
    text = MEASUREMENTS.read_text("utf-8")
    assert text == measurements()
    assert all(f"\n| `{key}` | {metric.unit}" in text for key, metric in METRICS.items())


ADDED = """
import sys
from datetime import timedelta
from pathlib import Path

import harness.results.metrics as metrics

source = Path(metrics.__file__).read_text("utf-8")
begin = "_DECLARED = ("
one = '_milliseconds("stall_s", "Stalls", "pauses", _COMPARED | _GATED, short="Pause"),'
assert source.count(begin) == 1
exec(source.replace(begin, begin + one), vars(metrics))

from harness.cli.app import main
from harness.results.comparison import check_metrics
from harness.results.store import ResultsStore
from tests.harness.results.test_gate import night
from tools.commands import measurements

with ResultsStore.open("results.db") as store:
    for number in range(24):
        night(store, number, 0.020 if number < 20 else 0.026, sessions=2, metric="stall_s")
assert check_metrics(["stall"]) == ("stall_s",)
print(measurements())
for words in (
    "report", "report --json", "history stall --json", "alerts ls --json",
    "gate --baseline 2026-11-20 --json", "results export runs.csv",
):
    print("=====")
    sys.argv = ["qnnfarm", *words.split(), "--db", "results.db"]
    try:
        main()
    except SystemExit:
        pass  # of a gate: 1 for a regression
"""


@pytest.mark.variant
def test_a_metric_is_declared_in_one_place(tmp_path: Path) -> None:
    """One that is added there is stored, compared, judged, reported, exported and documented."""
    child = [sys.executable, "-c", dedent(ADDED)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        child, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    document, terminal, *answers, _ = ended.stdout.split("=====\n")
    assert "| `stall_s` | s | compare, gate, history | pauses |" in document
    assert "Pause" in terminal
    report, (series,), (alert,), gate = map(json.loads, answers)
    assert report["rows"][0]["metrics"]["stall_s"]["sessions"] == 48
    assert [change["metric"] for change in report["changes"]] == ["stall_s"]
    assert [change["is_loss"] for change in series["changes"]] == [True]
    assert (alert["metric"], alert["state"]) == ("stall_s", "open")
    assert [(cell["metric"], cell["verdict"]) for cell in gate["cells"]] == [
        ("stall_s", "regressed")
    ]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Stalls<small>ms</small>" in page
    assert "stall_s" in (tmp_path / "runs.csv").read_text("utf-8").splitlines()[0]
