"""Verdicts over pairs of sessions: differences are seen, and rarely seen where none is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.comparison import Pair, compare
from harness.results.metrics import Metric, find_metric
from harness.results.statistics.paired import min_pairs
from harness.results.verdicts import Verdict

DECODE, TTFT = find_metric("decode_tokens_per_s"), find_metric("ttft_s")
speeds = st.floats(0.01, 1e6)
values = st.lists(speeds, min_size=1, max_size=4)
some_pairs = st.lists(st.tuples(values, values), max_size=9)


def pairs(*ratios: float, base: float = 100.0) -> list[Pair]:
    """Sessions of a phone that warms up slowly: what both share falls out."""
    return [
        ([base * 0.97**number], [base * 0.97**number * ratio])
        for number, ratio in enumerate(ratios)
    ]


def test_a_regression_is_seen_through_a_common_drift() -> None:
    found = compare(pairs(0.90, 0.91, 0.89, 0.90, 0.905, 0.9), metric=DECODE)
    assert found.verdict is Verdict.REGRESSED
    assert found.ratio is not None
    assert found.ratio == pytest.approx(0.90, abs=0.005)
    assert found.low is not None
    assert found.high is not None
    assert 0.88 < found.low < found.ratio < found.high < 0.92
    assert found.reason.startswith("9.9% worse (at least 9.5%")


@pytest.mark.parametrize(
    ("ratios", "metric", "threshold", "verdict", "reason"),
    [
        ((1.1, 1.12, 1.09, 1.1, 1.11), DECODE, 0.05, Verdict.IMPROVED, "better"),
        ((1.1, 1.12, 1.09, 1.1, 1.11), TTFT, 0.05, Verdict.REGRESSED, "worse"),
        (
            (1.0, 1.01, 0.99, 1.005, 0.995), DECODE, 0.05, Verdict.NO_DIFFERENCE,
            "a loss of more than 5.0% is ruled out",
        ),
        ((0.97, 0.972, 0.968, 0.971, 0.97), DECODE, 0.05, Verdict.NO_DIFFERENCE, "ruled out"),
        ((0.97, 0.972, 0.968, 0.971, 0.97), DECODE, 0.01, Verdict.REGRESSED, "worse"),
        # A gate that saw nothing must not say that all is well.
        ((0.8, 1.2, 0.85, 1.15, 1.0, 0.95), DECODE, 0.05, Verdict.NO_VERDICT, "run more of them"),
    ],
)  # fmt: skip
def test_verdicts(
    ratios: tuple[float, ...], metric: Metric, threshold: float, verdict: Verdict, reason: str
) -> None:
    found = compare(pairs(*ratios), metric=metric, threshold=threshold)
    assert found.verdict is verdict
    assert reason in found.reason


def test_too_few_pairs_are_no_data() -> None:
    found = compare(pairs(0.5, 0.5, 0.5, 0.5), metric=DECODE)
    assert found.verdict is Verdict.NO_VERDICT
    assert (found.low, found.high) == (None, None)
    assert found.ratio == pytest.approx(0.5)
    assert found.reason.startswith("4 pairs of sessions, and a verdict needs 5")
    nothing = compare([([1.0], []), ([], [1.0])], metric=DECODE)
    assert (nothing.pairs, nothing.ratio) == (0, None)


def test_metrics_share_the_error_rate() -> None:
    assert (min_pairs(1), min_pairs(2), min_pairs(3)) == (5, 6, 6)
    five = pairs(0.5, 0.5, 0.5, 0.5, 0.5)
    assert compare(five, metric=DECODE).verdict is Verdict.REGRESSED
    assert compare(five, metric=DECODE, metrics=2).verdict is Verdict.NO_VERDICT


@pytest.mark.parametrize(("size", "rounds"), [(5, 300), (8, 200), (16, 40)])
def test_the_interval_holds_the_truth_as_often_as_it_says(size: int, rounds: int) -> None:
    """Nothing is assumed of the noise but symmetry: this one has heavy tails."""
    source = np.random.default_rng(7)
    held, confidence = 0, 0.0
    for _ in range(rounds):
        logs = source.standard_t(3, size) * 0.02 + np.log(0.97)
        found = compare([([1.0], [float(np.exp(one))]) for one in logs], metric=DECODE)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.97 <= found.high
        confidence = found.confidence
    assert confidence >= 0.9
    assert held / rounds >= confidence - 0.08


def test_many_pairs_have_the_same_interval_each_time() -> None:
    """Of more than 14 pairs the subsets are drawn at random."""
    many = pairs(*np.random.default_rng(3).normal(0.97, 0.02, 16))
    assert compare(many, metric=DECODE) == compare(many, metric=DECODE)


def test_false_alarms_are_rare() -> None:
    """Where A and B are the same, any loss counts (threshold 0), and the phone is noisy."""
    source = np.random.default_rng(11)
    alarms, rounds = 0, 400
    for _ in range(rounds):
        logs = source.normal(0, 0.1, 7)
        made = [([1.0], [float(np.exp(one))]) for one in logs]
        found = compare(made, metric=DECODE, threshold=0.0)
        alarms += found.verdict is Verdict.REGRESSED
    assert alarms / rounds < 0.08


@given(some_pairs)
def test_swapping_sides_swaps_the_answer(made: list[tuple[list[float], list[float]]]) -> None:
    one = compare(made, metric=DECODE, threshold=0.0)
    other = compare([(b, a) for a, b in made], metric=DECODE, threshold=0.0)
    if one.ratio is not None and other.ratio is not None:
        assert one.ratio * other.ratio == pytest.approx(1.0)
    if one.low is not None and other.high is not None:
        assert one.low * other.high == pytest.approx(1.0)


@given(some_pairs)
def test_what_is_better_high_or_low_mirrors(made: list[tuple[list[float], list[float]]]) -> None:
    found = {compare(made, metric=metric).verdict for metric in (DECODE, TTFT)}
    assert found != {Verdict.REGRESSED}
    assert found != {Verdict.IMPROVED}


@given(some_pairs)
def test_the_interval_is_around_the_ratio(made: list[tuple[list[float], list[float]]]) -> None:
    found = compare(made, metric=DECODE)
    if found.low is not None and found.high is not None and found.ratio is not None:
        assert found.low <= found.high
        assert found.low <= found.ratio * (1 + 1e-9)
        assert found.ratio <= found.high * (1 + 1e-9)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        compare([([1.0], [value])], metric=DECODE)
