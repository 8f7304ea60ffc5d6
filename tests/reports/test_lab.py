"""Sessions, grades, comparisons, output checks and telemetry in the report."""

import pytest

from harness.results.records import Condition, OutputCheck, Run
from harness.results.verdicts import Verdict
from reports import document, text
from reports.summary import SummaryRow
from tests.reports import lab
from tests.reports.conftest import changed, composed, html_of


def row_of(*runs: Run) -> SummaryRow:
    (section,) = composed(runs).sections
    (row,) = section.rows
    return row


def test_a_cell_is_graded_with_its_reasons() -> None:
    row = row_of(*lab.sessions())
    assert (row.grade, row.output, row.n) == ("B", "checked", 12)
    reason = "1 of 4 sessions throttled: one grade lower"
    assert any(reason in each for each in row.grade_reasons)
    assert row_of(*lab.sessions()[:3]).grade == "A"
    assert row_of(lab.sessions()[0]).grade == "?"


def test_ungated_and_unsettled_sessions_lower_it() -> None:
    ungated = [changed(run, conditions=()) for run in lab.sessions()[:3]]
    assert row_of(*ungated).grade == "B"
    row = row_of(*(changed(run, warmup_detected=False) for run in ungated))
    assert row.grade == "C"
    assert "3 of 3 runs were not steady after their warm-ups" in row.remarks


def test_an_unchecked_speed_says_so_and_comes_after_checked_ones() -> None:
    checked, other = lab.sessions()[:2]
    unchecked = changed(other, check=OutputCheck(), labels={"team": "camera"})
    for runs in ((checked, unchecked), (unchecked, checked)):
        rows = document.to_document(composed(runs), "r.html")["rows"]
        assert isinstance(rows, list)
        assert [row["output"] for row in rows] == ["checked", "unchecked"]
        assert html_of(runs).count('data-output="unchecked"') == 1


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(0.08, Verdict.REGRESSED), (0.0, Verdict.NO_DIFFERENCE), (-0.08, Verdict.IMPROVED)],
)
def test_a_comparison_gets_its_verdict(loss: float, verdict: Verdict) -> None:
    runs = lab.comparison(loss)
    (group,) = composed(runs).sections[0].comparisons
    assert (group.verdict, group.unchecked) == (verdict, 12)
    assert verdict.value.capitalize() in html_of(runs)


def test_half_a_comparison_is_none() -> None:
    only_a = [run for run in lab.comparison() if run.label == "A"]
    assert composed(only_a).sections[0].comparisons == ()


def test_conditions_are_told_in_words() -> None:
    assert text.condition(lab.COOL) == (
        "met after 41.2 s, 38.5 to 34.9: the hottest zone, skin, is at or below 35 C"
    )
    assert text.condition({"outcome": "met"}) == "met"
    assert text.condition({"before": None, "after": "Asleep"}) == ", unknown to Asleep"
    html = html_of(lab.sessions()[3:4])
    assert "cpu_cap_hz:7 fell from 4320 to 2745 MHz" in html


def test_a_condition_of_any_shape_is_shown() -> None:
    odd: tuple[Condition, ...] = ({"temperature": 3}, {"name": 5, "outcome": None}, {})
    run = changed(lab.sessions()[0], conditions=odd)
    html = html_of([run])
    assert "<b>condition</b>" in html
    assert "<b>5</b>" in html
