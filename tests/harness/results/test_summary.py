"""Numbers out of repetitions, and what is said against them."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.pytest_plugin.measurements import format_table
from harness.results.comparison import compare_runs
from harness.results.metrics import remark_on, summarise
from harness.results.stability import grade_runs
from tests.reports.conftest import Sample, changed, composed

VALUES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


def test_one_session_is_described_by_its_repetitions() -> None:
    found = summarise([[17.0, 18.0, 19.0]])
    assert found is not None
    assert (found.n, found.sessions, found.mean, found.sd) == (3, 1, 18.0, 1.0)
    assert (found.median, found.minimum, found.maximum) == (18.0, 17.0, 19.0)


def test_several_sessions_are_the_unit() -> None:
    found = summarise([[10.0] * 9, [20.0], []])
    assert found is not None
    assert (found.n, found.sessions, found.mean, found.median) == (10, 2, 15.0, 10.0)
    assert found.sd == pytest.approx(statistics.stdev([10.0, 20.0]))


def test_nothing_gives_nothing() -> None:
    assert summarise([]) is None
    assert summarise([[], []]) is None
    assert remark_on([[]]) == ("only warm-ups, no measured repetition",)


@pytest.mark.parametrize(
    ("sessions", "words"),
    [
        ([[5.0]], "one repetition only"),
        ([[5.0, 5.01]], "2 repetitions only"),
        ([[5.0, 6.0, 7.0]], "standard deviation is 17% of the mean"),
        ([[10.0, 10.1], [14.0, 14.1]], "standard deviation between sessions is 23%"),
        ([[1.0, 1.0, 1.0, 1.0, 1.0, 3.0]], "largest value is 125% above the mean"),
        ([[10.0] * 30 + [3.0]], "smallest value is 69% below the mean"),
        ([[8.0, 10.0, 10.1, 9.9]], "first repetition is 20% off the others"),
    ],
)
def test_untrustworthy_numbers_get_remarks(sessions: list[list[float]], words: str) -> None:
    assert any(words in remark for remark in remark_on(sessions))


@pytest.mark.parametrize("sessions", [[[5.0, 5.1, 4.9]], [[5.0, 5.1], [4.9, 5.0]]])
def test_steady_numbers_get_no_remark(sessions: list[list[float]]) -> None:
    assert remark_on(sessions) == ()


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_means_lie_between_the_extremes(sessions: list[list[float]]) -> None:
    found = summarise(sessions)
    assert found is not None
    slack = 1e-9 * found.maximum
    assert found.minimum - slack <= found.mean <= found.maximum + slack
    assert found.n == sum(map(len, sessions))
    assert (found.sd is None) == (found.n == 1)
    assert all("\n" not in remark for remark in remark_on(sessions))


def test_report_plugin_grade_and_comparison_show_the_same_numbers() -> None:
    """Sessions differ in length, and one has an outlier: there definitions would part."""
    key, rates = "decode_tokens_per_s", ((50.0, 51.0, 52.0, 20.0), (48.0, 49.0), (46.0, 46.5, 47.0))
    phone = Sample("SM8750", emulator=False)
    runs = [
        phone.run(2 * number + (side == "B"), "bench", {key: [1.0, *(factor * v for v in values)]},
                  group_id="a" * 32, session=number, label=side)
        for number, values in enumerate(rates)
        for side, factor in (("A", 1.0), ("B", 0.9))
    ]  # fmt: skip
    sha256s = {"A": "f" * 64, "B": "b" * 64}
    runs = [changed(run, container__sha256=sha256s[run.label]) for run in runs]
    a_runs = [run for run in runs if run.label == "A"]
    expected = summarise([run.values(key) for run in a_runs])
    assert expected is not None
    assert expected.cv is not None

    (section,) = composed(runs).sections
    row = next(row for row in section.rows if row.runs == tuple(a_runs))
    assert row.cells[key] == expected

    rows = [
        {"model": "m", "test": "tg", "metric": key, "values": list(run.values(key)),
         "session": run.id}
        for run in a_runs
    ]  # fmt: skip
    shown = format_table(rows)[-1].split("|")[-2].strip()
    assert shown == f"{expected.mean:.2f} ± {expected.sd:.2f}"

    assert f"sessions vary by {expected.cv:.1%}" in grade_runs(a_runs, key).reasons[0]

    ((_, compared),) = compare_runs(runs[:2], metrics=(key,)).metrics
    a, b = (summarise([run.values(key)]) for run in runs[:2])
    assert a is not None
    assert b is not None
    assert compared.ratio == pytest.approx(b.mean / a.mean)
