"""Measures of a comparison agree with their definitions."""

import json
import math

import numpy as np
import pytest

from buildlib.numerics.comparison import (
    Bound,
    StageComparison,
    VerificationReport,
    compare,
    relative_difference,
)
from buildlib.numerics.trace import Trace, single_graph_schedule

N, VOCAB = 6, 5


EXACT = Bound("bit-exact")


def trace(*, shift: float = 0.0, key: str = "k") -> Trace:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(N, VOCAB)).astype(np.float32)
    cache = rng.normal(size=(N, 2, 1, 3)).astype(np.float32)
    return Trace(logits, {key: cache + np.float32(shift)}, single_graph_schedule(4, 12, N))


def compared(before: Trace, after: Trace, bound: Bound = EXACT) -> StageComparison:
    return compare("split", "ar4_cl12", bound, before, after, after.positions_of(4))


def test_relative_is_to_the_largest_of_the_reference() -> None:
    a = np.array([1.0, -4.0, 0.0], np.float32)
    assert relative_difference(a, a + np.float32(0.5)) == pytest.approx(0.125)
    assert relative_difference(a, a) == 0
    assert relative_difference(a * 0, a) == math.inf


def test_equal_traces_pass_every_bound() -> None:
    for bound in (Bound("bit-exact"), Bound("relative", 0), Bound("sqnr", 200), Bound("finite")):
        one = compared(trace(), trace(), bound)
        assert one.passed
        assert (one.max_abs_diff, one.greedy_agreement, one.positions) == (0, 1, N)


def test_a_difference_in_the_caches_counts_and_is_named() -> None:
    one = compared(trace(), trace(shift=1e-3))
    assert not one.passed
    assert one.note == "largest in k"
    assert one.max_abs_diff == pytest.approx(1e-3, rel=1e-3)
    assert one.sqnr_db == math.inf  # the logits are the same
    assert compared(trace(), trace(shift=1e-3), Bound("relative", 1e-2)).passed


@pytest.mark.parametrize("which", ["before", "after", "both"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_never_pass(which: str, value: float) -> None:
    sides = {"before": trace(), "after": trace()}
    for name in sides if which == "both" else [which]:
        sides[name].logits[2, 3] = value
    with np.errstate(invalid="ignore"):
        for measure in ("bit-exact", "relative", "sqnr", "finite"):
            one = compared(sides["before"], sides["after"], Bound(measure, -1e9))
            assert not one.passed
    assert "not finite" in one.note


def test_positions_of_other_graphs_do_not_count() -> None:
    schedule = single_graph_schedule(1, 12, N)[:2]
    mixed = Trace(trace().logits, trace().caches, (*schedule, *single_graph_schedule(4, 12, 4)))
    mixed.logits[0] += 1
    assert compared(trace(), mixed).passed
    assert compared(trace(), mixed).positions == 4


def test_incomparable_traces_fail() -> None:
    other = compared(trace(), trace(key="other"))
    assert not other.passed
    assert other.note == "k is not the same tensor on both"
    none = compare("x", "y", Bound("finite"), trace(), trace(), np.array([N + 3]))
    assert not none.passed
    assert none.positions == 0


def test_a_report_is_json_and_an_empty_one_does_not_pass() -> None:
    report = VerificationReport((compared(trace(), trace()), compared(trace(), trace(shift=1))))
    assert not report.passed
    assert report.failures == report.comparisons[1:]
    data = json.loads(report.to_json())
    assert data["comparisons"][0]["sqnr_db"] is None
    assert data["comparisons"][1]["bound"] == "bit-exact"
    again = VerificationReport.of(data)
    assert again.comparisons[0].sqnr_db == math.inf
    assert again.to_json() == report.to_json()
    nothing = VerificationReport((StageComparison("split", "ar1_cl8", note="nothing ran"),))
    (read,) = VerificationReport.of(json.loads(nothing.to_json())).comparisons
    assert math.isnan(read.sqnr_db)
    assert not VerificationReport(()).passed
    assert str(Bound("sqnr", 40)) == "SQNR >= 40 dB"
