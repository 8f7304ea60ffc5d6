"""Sessions, grades, comparisons, output checks and telemetry in the report."""

import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.comparison import Verdict
from harness.results.records import (
    Condition,
    OutputCheck,
    RepetitionTelemetry,
    Run,
    TelemetrySeries,
)
from harness.results.store import ResultsStore
from reports import document, html_file, page, telemetry, text
from reports.page import Results
from tests.reports import lab

MakeStore = Callable[[Sequence[Run]], Path]


def composed(*runs: Run) -> page.Page:
    return page.compose(Results("results.db", runs, ()))


def changed(run: Run, **changes: object) -> Run:
    return run.model_copy(update=changes)


def test_a_cell_is_graded_with_its_reasons() -> None:
    (section,) = composed(*lab.sessions()).sections
    (row,) = section.rows
    assert (row.grade, row.output, row.n) == ("B", "checked", 12)
    assert any(
        "1 of 4 sessions throttled: one grade lower" in reason for reason in row.grade_reasons
    )
    calm = composed(*lab.sessions()[:3]).sections[0].rows[0]
    assert calm.grade == "A"
    assert composed(lab.sessions()[0]).sections[0].rows[0].grade == "?"


def test_ungated_and_unsettled_sessions_lower_it() -> None:
    ungated = [changed(run, conditions=()) for run in lab.sessions()[:3]]
    assert composed(*ungated).sections[0].rows[0].grade == "B"
    unsettled = [changed(run, warmup_detected=False) for run in ungated]
    row = composed(*unsettled).sections[0].rows[0]
    assert row.grade == "C"
    assert "3 of 3 runs were not steady after their warm-ups" in row.remarks


def test_an_unchecked_speed_says_so_and_comes_after_checked_ones() -> None:
    checked, other = lab.sessions()[:2]
    newer = other.provenance.model_copy(update={"qnnfarm_version": "0.2"})
    unchecked = changed(other, check=OutputCheck(), provenance=newer)
    for runs in ((checked, unchecked), (unchecked, checked)):
        found = composed(*runs)
        assert [row.output for row in found.sections[0].rows] == ["checked", "unchecked"]
        html = html_file.render(found, datetime.now(UTC))
        assert html.count('data-output="unchecked"') == 1
        document_rows = document.to_document(found, "r.html")["rows"]
        assert isinstance(document_rows, list)
        assert [row["output"] for row in document_rows] == ["checked", "unchecked"]


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (0.08, Verdict.REGRESSED),
        (0.0, Verdict.NO_DIFFERENCE),
        (-0.08, Verdict.IMPROVED),
    ],
)
def test_a_comparison_gets_its_verdict(loss: float, verdict: Verdict) -> None:
    found = composed(*lab.comparison(loss))
    (group,) = found.sections[0].comparisons
    assert group.verdict is verdict
    assert group.unchecked == 12
    assert verdict.value.capitalize() in html_file.render(found, datetime.now(UTC))


def test_half_a_comparison_is_none() -> None:
    only_a = [run for run in lab.comparison() if run.label == "A"]
    assert composed(*only_a).sections[0].comparisons == ()


def test_conditions_are_told_in_words() -> None:
    assert text.condition(lab.COOL) == (
        "met after 41.2 s, 38.5 to 34.9: the hottest zone, skin, is at or below 35 C"
    )
    assert text.condition({"outcome": "met"}) == "met"
    assert text.condition({"before": None, "after": "Asleep"}) == ", unknown to Asleep"
    html = html_file.render(composed(lab.sessions()[3]), datetime.now(UTC))
    assert "cpu_cap_hz:7 fell from 4320 to 2745 MHz" in html


def test_telemetry_comes_out_of_the_store_as_plots(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with ResultsStore.open(path) as store:
        lab.add_telemetry(store, lab.sessions())
    found = page.compose(page.load(str(path)))
    (section,) = found.sections
    assert len(section.figures) == 4
    figure = section.figures[0]
    assert [panel.title for panel in figure.panels] == [
        "Temperature",
        "Clocks",
        "Memory",
        "Battery power",
    ]
    assert [band.is_warmup for band in figure.bands] == [True, False, False, False]
    assert figure.panels[0].left_out == 3
    assert re.fullmatch(r"3\.\d\d to 5\.\d\d", figure.panels[3].lines[0].text)
    html = html_file.render(found, datetime.now(UTC))
    points = re.findall(r'points="([^"]*)"', html)
    assert points
    numbers = [float(n) for point in points for pair in point.split() for n in pair.split(",")]
    assert min(numbers) >= -0.1
    assert max(numbers) <= telemetry.SIDE + 2


def repetition(*series: TelemetrySeries) -> list[RepetitionTelemetry]:
    return [RepetitionTelemetry(0, is_warmup=False, series=series)]


def test_a_gap_in_the_samples_is_a_gap_in_the_line() -> None:
    run = lab.sessions()[0]
    series = TelemetrySeries("rss_bytes", "bytes", (0, 1, 2, 3, 4), (1e6, 2e6, None, 2e6, 3e6))
    figure = telemetry.figure(run, repetition(series))
    assert figure is not None
    assert len(figure.panels[0].lines[0].pieces) == 2


def test_many_samples_are_thinned_and_keep_their_extremes() -> None:
    run = lab.sessions()[0]
    values = [40.0] * 20_000
    values[12_345] = 99.0
    times = tuple(n / 10 for n in range(20_000))
    figure = telemetry.figure(
        run, repetition(TelemetrySeries("temp_c:skin", "degC", times, tuple(values)))
    )
    assert figure is not None
    (line,) = figure.panels[0].lines
    assert sum(len(piece.split()) for piece in line.pieces) <= 2 * telemetry.MOST_POINTS
    assert line.text == "40.0 to 99.0"
    heights = [float(pair.partition(",")[2]) for pair in line.pieces[0].split()]
    assert min(heights) < 20


@pytest.mark.parametrize(
    "series",
    [
        TelemetrySeries("temp_c:a", "degC", (), ()),
        TelemetrySeries("temp_c:a", "degC", (0.0, 1.0), (None, None)),
        TelemetrySeries("temp_c:a", "degC", (1.0,), (40.0,)),
        TelemetrySeries("unknown", "x", (0.0, 1.0), (1.0, 2.0)),
    ],
)
def test_nothing_to_plot_is_no_plot(series: TelemetrySeries) -> None:
    assert telemetry.figure(lab.sessions()[0], repetition(series)) is None


def test_values_that_never_change_are_plotted() -> None:
    series = TelemetrySeries("temp_c:a", "degC", (0.0, 1.0), (40.0, 40.0))
    figure = telemetry.figure(lab.sessions()[0], repetition(series))
    assert figure is not None
    assert (figure.panels[0].low, figure.panels[0].high) == ("40.0", "50.0")


@given(st.floats(1e-9, 1e9), st.integers(1, 6))
def test_values_that_differ_by_a_bit_are_plotted(value: float, steps: int) -> None:
    other = value
    for _ in range(steps):
        other = math.nextafter(other, math.inf)
    series = TelemetrySeries("temp_c:a", "degC", (0.0, 1.0), (value, other))
    figure = telemetry.figure(lab.sessions()[0], repetition(series))
    assert figure is not None
    heights = [
        float(pair.partition(",")[2]) for pair in figure.panels[0].lines[0].pieces[0].split()
    ]
    assert all(0 <= height <= telemetry.SIDE for height in heights)


def test_a_condition_of_any_shape_is_shown() -> None:
    odd: tuple[Condition, ...] = ({"temperature": 3}, {"name": 5, "outcome": None}, {})
    run = changed(lab.sessions()[0], conditions=odd)
    html = html_file.render(composed(run), datetime.now(UTC))
    assert "<b>condition</b>" in html
    assert "<b>5</b>" in html


def test_a_hostile_channel_is_only_text(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    run = lab.sessions()[0]
    name = 'temp_c:<script>alert(1)</script>"'
    with ResultsStore.open(path) as store:
        recorder = store.begin_run(changed(run, status="running"))
        series = TelemetrySeries(name, "degC", (0.0, 1.0), (40.0, 41.0))
        recorder.add_telemetry([series], repetition=0)
        recorder.finish()
    html = html_file.render(page.compose(page.load(str(path))), datetime.now(UTC))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
