"""Measures of a comparison agree with their definitions."""

import json
import math

import numpy as np
import pytest

from buildlib.numerics.comparison import (
    EXACT,
    FINITE,
    Bound,
    SideComparison,
    VerificationReport,
    relative_difference,
)
from buildlib.numerics.divergence import Divergence

EQUAL = Divergence(0.0, 1.0, 2.0, 2.0, 9, sqnr_db=math.inf, relative=0.0)
APART = Divergence(0.3, 0.5, 2.5, 2.0, 9, sqnr_db=30.0, relative=0.1)


def test_relative_is_to_the_largest_of_the_reference() -> None:
    a = np.array([1.0, -4.0, 0.0], np.float32)
    assert relative_difference(a, a + np.float32(0.5)) == pytest.approx(0.125)
    assert relative_difference(a, a) == 0
    assert relative_difference(a * 0, a) == math.inf


@pytest.mark.parametrize(
    ("bound", "holds"),
    [
        (EXACT, False),
        (FINITE, True),
        (Bound("relative", 0.1), True),
        (Bound("relative", 0.09), False),
        (Bound("sqnr", 30), True),
        (Bound("sqnr", 31), False),
        (Bound("kl", 0.3), True),
        (Bound("kl", 0.2), False),
    ],
)
def test_equal_logits_meet_every_bound_and_others_those_that_are_far(
    bound: Bound, *, holds: bool
) -> None:
    assert bound.holds(EQUAL)
    assert bound.holds(APART) == holds


def test_a_report_is_json_and_an_empty_one_does_not_pass() -> None:
    rows = (
        SideComparison("float", divergence=EQUAL, bound=""),
        SideComparison("split", "ar1_cl8", None, APART, str(EXACT), passed=False),
        SideComparison("compile", bound="SQNR >= 40 dB", passed=False, note="nothing ran"),
    )
    report = VerificationReport(rows)
    assert not report.passed
    assert report.failures == rows[1:]
    document = report.as_document()
    assert document["first_outside"] == "split"
    again = VerificationReport.of(json.loads(json.dumps(document, allow_nan=False)))
    assert again.as_document() == document
    assert again.rows[0].found.sqnr_db == math.inf
    with pytest.raises(ValueError, match="nothing ran"):
        _ = again.rows[2].found
    assert not VerificationReport(()).passed
