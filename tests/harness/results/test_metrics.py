"""The registry of metrics."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MetricError
from harness.results.metrics import METRICS, Direction, Measurement, find_metric

UNIT_SUFFIXES = ("_per_s", "_s", "_bytes", "_tokens", "_files", "_texts")


def test_a_key_names_its_unit() -> None:
    others = {metric.unit for key, metric in METRICS.items() if not key.endswith(UNIT_SUFFIXES)}
    assert others <= {"", "nats"}


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


def test_the_document_lists_every_metric_with_its_unit() -> None:
    document = Path(__file__).parents[3] / "docs" / "measurements.md"
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w/]*) ?\| (\S.*) \|$", document.read_text("utf-8"), re.MULTILINE
    )
    assert [(key, unit) for key, unit, _ in rows] == [(m.key, m.unit) for m in METRICS.values()]
